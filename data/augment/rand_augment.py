"""RandAugment (Cubuk et al. 2020): random operations out of 14, with the same magnitude.

At magnitude 10, operations have the strength of AutoAugment (Cubuk et al. 2019).
"""

from collections.abc import Callable

import numpy as np
from pydantic import Field

from data.augment.base import Augmentation, Fill
from data.augment.image_operations import (
    autocontrast,
    brightness,
    contrast,
    equalize,
    posterize,
    rotate,
    saturation,
    sharpness,
    shear,
    solarize,
    translate,
)
from data.base_config import FrozenConfig

_SHIFT = 150 / 331  # AutoAugment's shift in pixels, divided by its image side

# (image, strength from -1 to 1, fill) -> image. Operations without a direction use the absolute
# value of the strength.
OPERATIONS: dict[str, Callable[[np.ndarray, float, Fill], np.ndarray]] = {
    "identity": lambda image, strength, fill: image,
    "autocontrast": lambda image, strength, fill: autocontrast(image),
    "equalize": lambda image, strength, fill: equalize(image),
    "rotate": lambda image, strength, fill: rotate(image, 30 * strength, fill),
    "solarize": lambda image, strength, fill: solarize(image, 256 - 256 * abs(strength)),
    "posterize": lambda image, strength, fill: posterize(image, 8 - round(4 * abs(strength))),
    "contrast": lambda image, strength, fill: contrast(image, 1 + 0.9 * strength),
    "brightness": lambda image, strength, fill: brightness(image, 1 + 0.9 * strength),
    "sharpness": lambda image, strength, fill: sharpness(image, 1 + 0.9 * strength),
    "shear-x": lambda image, strength, fill: shear(image, 0.3 * strength, 0, fill),
    "shear-y": lambda image, strength, fill: shear(image, 0, 0.3 * strength, fill),
    "translate-x": lambda image, strength, fill: translate(image, _SHIFT * strength, 0, fill),
    "translate-y": lambda image, strength, fill: translate(image, 0, _SHIFT * strength, fill),
    # Keep this operation last. It does not change gray images, so `RandAugment` drops it for them.
    "colour": lambda image, strength, fill: saturation(image, 1 + 0.9 * strength),
}
_ALL = tuple(OPERATIONS.values())


class RandAugment(FrozenConfig, Augmentation):
    """RandAugment (Cubuk et al. 2020) on the paper's scale, which is also timm's.

    Operations are drawn with replacement. This scale goes up to 10, but torchvision's goes up to
    30, so magnitude 9 in torchvision corresponds to 3 here.
    """

    operations: int = Field(2, ge=1, le=14, description="number of operations per image")
    magnitude: float = Field(9, ge=0, le=10, description="strength of each operation")

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        chosen = _ALL if image.ndim == 3 else _ALL[:-1]
        for _ in range(self.operations):
            operation = chosen[rng.integers(len(chosen))]
            strength = self.magnitude / 10 * (1 if rng.random() < 0.5 else -1)
            image = operation(image, strength, fill)
        return image
