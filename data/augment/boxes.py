"""Random boxes: what cropping keeps, random erasing covers and cutmix exchanges."""

import math

import numpy as np

_ATTEMPTS = 10

Box = tuple[int, int, int, int]
"""top, left, height, width; pixels"""


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
