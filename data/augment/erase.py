"""Random erasing."""

from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, RootModel

from data.augment.base import Augmentation, Fill, random_box

# The defaults of timm and torchvision.
_AREA = (0.02, 1 / 3)
_RATIO = (0.3, 3.3)


class Erase(RootModel[Annotated[float, Field(ge=0, le=1)]], Augmentation):
    """Random erasing (Zhong et al. 2020): with this probability, fills a box with `image.mean`.

    Nothing is erased if none of ten random boxes fits.
    """

    model_config = ConfigDict(frozen=True)

    def __call__(self, image: np.ndarray, fill: Fill, rng: np.random.Generator) -> np.ndarray:
        if rng.random() >= self.root:
            return image
        box = random_box(image.shape[0], image.shape[1], _AREA, _RATIO, rng)
        if box is None:
            return image
        top, left, height, width = box
        erased = image.copy()
        erased[top : top + height, left : left + width] = fill
        return erased
