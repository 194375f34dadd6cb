"""Random conversion to grayscale."""

from typing import Annotated

import cv2
import numpy as np
from pydantic import ConfigDict, Field, RootModel

from data.augment.base import Augmentation, Fill


class Grayscale(RootModel[Annotated[float, Field(ge=0, le=1)]], Augmentation):
    """Converts the image to grayscale with this probability (SimCLR, Chen et al. 2020)."""

    model_config = ConfigDict(frozen=True)

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= self.root or image.ndim == 2:
            return image
        return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
