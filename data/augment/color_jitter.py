"""Color jitter: brightness, contrast, saturation and hue."""

import numpy as np
from pydantic import Field, model_validator

from data.augment.base import Augmentation, Fill
from data.augment.image_operations import brightness, contrast, hue, saturation
from data.base_config import FrozenConfig


class ColorJitter(FrozenConfig, Augmentation):
    """Color jitter (Howard 2013): brightness, contrast, saturation and hue in random order.

    Strengths have the same meaning as in torchvision's ColorJitter. The first three properties are
    scaled by a factor from 1 - strength to 1 + strength. The hue is rotated by up to `hue`, a
    fraction of the color circle. Saturation and hue do not apply to images with one channel.
    """

    brightness: float = Field(0, ge=0)
    contrast: float = Field(0, ge=0)
    saturation: float = Field(0, ge=0)
    hue: float = Field(0, ge=0, le=0.5)
    probability: float = Field(1, ge=0, le=1)

    @model_validator(mode="after")
    def _changes_something(self) -> "ColorJitter":
        if not (self.brightness or self.contrast or self.saturation or self.hue):
            raise ValueError(
                "colour has no effect: set brightness, contrast, saturation or hue, or set "
                "colour to null"
            )
        return self

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= self.probability:
            return image
        steps = [
            (brightness, 1.0, self.brightness),
            (contrast, 1.0, self.contrast),
            (saturation, 1.0, self.saturation),
            (hue, 0.0, self.hue),
        ]
        if image.ndim == 2:
            steps = steps[:2]
        for change, neutral, strength in (steps[i] for i in rng.permutation(len(steps))):
            if strength:
                low = max(0.0, neutral - strength) if neutral else -strength
                image = change(image, rng.uniform(low, neutral + strength))
        return image
