"""The base class of all augmentations, and the random numbers that they use.

Draws are keyed by (seed, epoch, sample), and draws for mixing two images are keyed by (seed, pair
of stream positions). Pixels therefore do not depend on the number of ranks or workers, or on the
step at which a run was resumed.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Fill = tuple[float, ...]
"""The value of each channel in pixels that an augmentation leaves empty."""

# Separate these draws from other uses of the same seed.
_SAMPLES = 0x6B776179  # "kway"
_PAIRS = 0x70616972  # "pair"
_BOX_ATTEMPTS = 10

Box = tuple[int, int, int, int]
"""top, left, height and width in pixels"""


class Augmentation(ABC):
    """A random change to one image. `AugmentConfig` applies its fields of this type in order.

    A subclass is a pydantic model of its parameters: a `FrozenConfig` for a mapping in the recipe,
    or a `RootModel` for a single number. Its docstring cites the paper.
    """

    @abstractmethod
    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        """Return an image of the same shape as `image`, which is not modified.

        image: uint8 [H, W, 3], or gray [H, W]. All random numbers come from `rng`, those of the
        sample. An augmentation with a probability always draws, even if the probability is 0,
        so that disabling it does not change the random numbers of the other augmentations.
        """


class Draws:
    """The random numbers of one sample at a time: numpy's Philox generator (Salmon et al. 2011),
    whose counter contains the epoch and the index of the sample.

    One generator is reused, because creating one takes longer than drawing the numbers of a sample.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox()
        self._start: Any = philox(0, _SAMPLES, 0, 0).state
        self._key, self._counter = self._start["state"]["key"], self._start["state"]["counter"]
        self.rng = np.random.Generator(self._philox)

    def at(self, seed: int, epoch: int, index: int) -> np.random.Generator:
        """Return `rng`, which begins with the numbers of a sample."""
        self._key[0], self._counter[1], self._counter[2] = seed, index, epoch
        self._philox.state = self._start
        return self.rng


def pair_rng(seed: int, position: int) -> np.random.Generator:
    """Return a generator that is the same for positions 2n and 2n + 1 of the endless stream."""
    return np.random.Generator(philox(seed, _PAIRS, position // 2, 0))


def philox(seed: int, stream: int, index: int, epoch: int) -> np.random.Philox:
    """Return the bit generator of one of the uses (`stream`) of a seed."""
    # Philox increments the first word of its counter, and the other words identify the stream.
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64), counter=counter)


def two_draws(count: int, rng: np.random.Generator) -> tuple[int, int]:
    """Draw two numbers from [0, count), with `count` from 2 to 2^16, from one word of 64 bits.

    The halves of the word are scaled (Lemire 2019, "Fast Random Integer Generation in an
    Interval"). Two calls of `rng.integers` give the same numbers, except with a probability below
    `count` / 2^31, but take three times as long.
    """
    word = rng.bit_generator.random_raw()
    return (word & 0xFFFFFFFF) * count >> 32, (word >> 32) * count >> 32


def random_box(
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
    rng: np.random.Generator,
) -> Box | None:
    """Return a random box inside height x width, or None if none of ten draws fits.

    area: the range from which the area of the box, as a fraction of the image, is drawn uniformly.
    ratio: the range from which width / height is drawn log-uniformly.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_BOX_ATTEMPTS):
        pixels = height * width * rng.uniform(*area)
        shape = math.exp(rng.uniform(low, high))
        box_height, box_width = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < box_height <= height and 0 < box_width <= width:
            top = int(rng.integers(height - box_height + 1))
            left = int(rng.integers(width - box_width + 1))
            return top, left, box_height, box_width
    return None
