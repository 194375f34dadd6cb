"""Left-right flips."""

from typing import Annotated

import cv2
import numpy as np
from pydantic import ConfigDict, Field, RootModel

from data.augment.base import Augmentation, Fill


class Flip(RootModel[Annotated[float, Field(ge=0, le=1)]], Augmentation):
    """Flips the image left to right with this probability."""

    model_config = ConfigDict(frozen=True)

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        return cv2.flip(image, 1) if rng.random() < self.root else image
