"""One decoded picture -> one training sample, each draw from the sample's own generator.

The order: crop or shift, flip, colour jitter, greyscale, RandAugment, erasing. Mixing with another
sample comes after it (`data/augment/mix.py`).
"""

import cv2
import numpy as np

from data.augment.colour import greyscale, jitter
from data.augment.crop import drawn_box, random_box, resized
from data.augment.geometry import Fill
from data.augment.rand_augment import rand_augment
from data.config import AugmentConfig, ImageConfig
from data.images.decode import centre, planes

# Of random erasing (Zhong et al. 2020), as timm and torchvision have them.
_ERASED_AREA = (0.02, 1 / 3)
_ERASED_RATIO = (0.3, 3.3)


def for_training(
    picture: np.ndarray, image: ImageConfig, augment: AugmentConfig, rng: np.random.Generator
) -> np.ndarray:
    """uint8 [H, W, C] -> uint8 [C, size, size], a new array."""
    fill: Fill = tuple(round(255 * min(max(mean, 0.0), 1.0)) for mean in image.mean)
    drawn = _cropped(picture, image, augment, fill, rng)
    if image.channels == 1:
        drawn = drawn[:, :, 0]
    if rng.random() < augment.flip:
        drawn = cv2.flip(drawn, 1)
    if augment.colour is not None:
        drawn = jitter(drawn, augment.colour, rng)
    if rng.random() < augment.grey and image.channels == 3:
        drawn = greyscale(drawn)
    if augment.rand_augment is not None:
        drawn = rand_augment(drawn, augment.rand_augment, fill, rng)
    pixels = planes(drawn)
    if rng.random() < augment.erase:
        _erase(pixels, fill, rng)
    return pixels


def _cropped(
    picture: np.ndarray,
    image: ImageConfig,
    augment: AugmentConfig,
    fill: Fill,
    rng: np.random.Generator,
) -> np.ndarray:
    """uint8 [size, size, C]: a random box, or the centre that evaluation takes, which may shift."""
    if augment.crop_area is None:
        middle = centre(picture, image)
        return _shifted(middle, augment.pad, fill, rng) if augment.pad else middle
    top, left, height, width = random_box(picture.shape[0], picture.shape[1], augment, rng)
    return resized(picture[top : top + height, left : left + width], image.size)


def _shifted(picture: np.ndarray, most: int, fill: Fill, rng: np.random.Generator) -> np.ndarray:
    """A random window of [H, W, C] with `most` pixels of `fill` around it (He et al. 2016, 4.2)."""
    height, width, channels = picture.shape
    padded = np.empty((height + 2 * most, width + 2 * most, channels), np.uint8)
    padded[:] = fill
    padded[most : most + height, most : most + width] = picture
    top, left = rng.integers(2 * most + 1, size=2)
    return padded[top : top + height, left : left + width]


def _erase(pixels: np.ndarray, fill: Fill, rng: np.random.Generator) -> None:
    """Cover a random box of [C, H, W] with `fill`; after ten boxes that do not fit, nothing."""
    box = drawn_box(pixels.shape[1], pixels.shape[2], _ERASED_AREA, _ERASED_RATIO, rng)
    if box is not None:
        top, left, height, width = box
        pixels[:, top : top + height, left : left + width] = np.reshape(fill, (-1, 1, 1))
