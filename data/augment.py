"""Random resized crop and flip, each draw a function of (seed, epoch, sample) and of nothing else.

So pixels do not depend on ranks, workers, or where a run was resumed.
"""

import math

import numpy as np

from data.config import AugmentConfig, ImageConfig
from data.images import for_evaluation, resize

_ATTEMPTS = 10
_STREAM = 0x6B776179  # "kway": keeps these draws apart from other uses of the same seed


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """A generator of its own for one sample of one epoch.

    Philox counts in the first word of its counter; the others say who counts (Salmon et al. 2011).
    """
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = np.array([seed, _STREAM], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def for_training(
    picture: np.ndarray, image: ImageConfig, augment: AugmentConfig, rng: np.random.Generator
) -> np.ndarray:
    """uint8 [H, W, C] -> uint8 [C, size, size]: a random crop (or the centre), perhaps flipped."""
    if augment.crop_area is None:
        result = for_evaluation(picture, image)
    else:
        top, left, height, width = random_box(picture.shape[0], picture.shape[1], augment, rng)
        crop = picture[top : top + height, left : left + width]
        result = resize(crop, image.size, image.size).transpose(2, 0, 1)
    if rng.random() < augment.flip:
        result = result[:, :, ::-1]
    return np.ascontiguousarray(result)


def random_box(
    height: int, width: int, augment: AugmentConfig, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """(top, left, height, width) of a box of random area and shape (Szegedy et al. 2015).

    After ten misses: the largest centred box whose aspect ratio is allowed.
    """
    assert augment.crop_area is not None
    low, high = augment.crop_ratio
    for _ in range(_ATTEMPTS):
        area = height * width * rng.uniform(*augment.crop_area)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        box_height, box_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top = int(rng.integers(height - box_height + 1))
            left = int(rng.integers(width - box_width + 1))
            return top, left, box_height, box_width
    ratio = min(max(width / height, low), high)
    box_height = max(1, min(height, round(width / ratio)))
    box_width = max(1, min(width, round(height * ratio)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width
