"""User-defined augmentations, given by import path in the recipe's `data.augment.custom`."""

import numpy as np

from data.augment.base import Augmentation, Fill
from data.base_config import FrozenConfig


class CustomAugmentation(FrozenConfig, Augmentation):
    """A user-defined augmentation. `kind` is its import path; the other fields are options.

    The result of `__call__` must depend only on its arguments and the options. `rng` depends on
    (seed, epoch, sample), so a sample gets the same pixels on every rank, in every worker and after
    a resume. Do not use `rng` after the call, because it is reseeded for the next sample.
    """

    kind: str

    def checked(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        """Call the augmentation and check its result.

        Raises ValueError if the result differs from `image` in dtype or shape.
        """
        changed: object = self(image, fill, rng)
        if not isinstance(changed, np.ndarray):
            raise ValueError(f"{self.kind} returned {type(changed).__name__}: return a numpy array")
        if (changed.dtype, changed.shape) != (image.dtype, image.shape):
            raise ValueError(
                f"{self.kind} returned {changed.dtype} {list(changed.shape)} for an image of "
                f"{image.dtype} {list(image.shape)}: return an array of the same dtype and shape"
            )
        return changed


def check_imported(value: object) -> object:
    """Validate an entry of `data.augment.custom`, which has already been imported."""
    if not isinstance(value, CustomAugmentation):
        raise ValueError("set kind to the import path of a class, as in my_package.images:Noise")
    return value
