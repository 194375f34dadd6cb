"""What an augmentation of one image is: a class with its parameters and `__call__`."""

from abc import ABC, abstractmethod

import numpy as np

Fill = tuple[float, ...]
"""The level of each channel where a change leaves pixels empty."""


class Change(ABC):
    """A random change of one image: a field of `AugmentConfig`, in whose order they are applied.

    A subclass is a pydantic model of its parameters, a `FrozenConfig` for a mapping in the recipe
    or a `RootModel` for one number. Its docstring names the paper.
    """

    @abstractmethod
    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        """uint8 [H, W, 3], or gray [H, W], of the same shape; `image` itself is not modified.

        Every number comes from `rng`, the generator of the sample. Changes that are drawn with a
        probability draw even if it is 0, so that turning one off does not alter the others.
        """
