"""Random boxes: what training crops and resizes, and what random erasing covers."""

import math

import cv2
import numpy as np

from data.config import AugmentConfig

_ATTEMPTS = 10

Box = tuple[int, int, int, int]  # top, left, height, width; pixels


def random_box(height: int, width: int, augment: AugmentConfig, rng: np.random.Generator) -> Box:
    """A box of random area and shape to crop (Szegedy et al. 2015).

    After ten misses: the largest centred box whose aspect ratio is allowed.
    """
    assert augment.crop_area is not None
    drawn = drawn_box(height, width, augment.crop_area, augment.crop_ratio, rng)
    if drawn is not None:
        return drawn
    low, high = augment.crop_ratio
    ratio = min(max(width / height, low), high)
    box_height = max(1, min(height, round(width / ratio)))
    box_width = max(1, min(width, round(height * ratio)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resized(picture: np.ndarray, size: int) -> np.ndarray:
    """[H, W, C] -> [size, size, C], twice as fast as the area averaging that evaluation does.

    Bilinear, after whole blocks of pixels were averaged where a side is twice as long or more. To
    Lanczos' method it comes as close as area averaging does up to 1.5 times, within 2 dB to 2.
    """
    height, width = picture.shape[:2]
    rows, columns = max(height // size, 1), max(width // size, 1)
    if rows > 1 or columns > 1:
        height, width = height // rows, width // columns
        whole = picture[: height * rows, : width * columns]
        picture = cv2.resize(whole, (width, height), interpolation=cv2.INTER_AREA)
    drawn = cv2.resize(picture, (size, size), interpolation=cv2.INTER_LINEAR)
    return drawn.reshape(size, size, -1)


def drawn_box(
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box | None:
    """A box inside height x width; None after ten that do not fit.

    area: its share of the whole, uniform; ratio: its width / height, uniform in the logarithm.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_ATTEMPTS):
        pixels = height * width * rng.uniform(*area)
        shape = math.exp(rng.uniform(low, high))
        box_height, box_width = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < box_height <= height and 0 < box_width <= width:
            top = int(rng.integers(height - box_height + 1))
            left = int(rng.integers(width - box_width + 1))
            return top, left, box_height, box_width
    return None
