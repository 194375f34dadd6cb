"""Mixup and CutMix of two images.

Positions 2n and 2n + 1 of the endless stream form a pair. Both images use the same draw from
`pair_rng`, so each image keeps the same fraction of its own pixels and takes the remainder from the
other.
"""

import math
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from pydantic import Field, model_validator

from data.augment.base import Box
from data.base_config import FrozenConfig


@dataclass(frozen=True)
class MixDraw:
    """The parameters of one mix.

    weight: the fraction of its own pixels that an image keeps, which is also the weight of its own
    label. box: the region that CutMix copies from the partner, at the same position.
    """

    kind: Literal["none", "mixup", "cutmix"]
    weight: float = 1.0
    box: Box = (0, 0, 0, 0)

    def __call__(self, image: np.ndarray, partner: np.ndarray) -> np.ndarray:
        """Return `image`, uint8 [C, H, W], mixed with `partner`. Neither input is modified."""
        if self.kind == "mixup":
            # Reshape to matrix rows, because OpenCV treats the last of three axes as channels.
            own, other = (array.reshape(-1, array.shape[-1]) for array in (image, partner))
            return cv2.addWeighted(own, self.weight, other, 1 - self.weight, 0).reshape(image.shape)
        if self.kind == "cutmix":
            top, left, height, width = self.box
            inside = np.s_[:, top : top + height, left : left + width]
            image = image.copy()
            image[inside] = partner[inside]
        return image


class Mix(FrozenConfig):
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of adjacent samples in the stream.

    Weights are drawn from Beta(alpha, alpha). An alpha of 0 disables a method.
    """

    mixup_alpha: float = Field(0, ge=0, le=1000)
    cutmix_alpha: float = Field(0, ge=0, le=1000)
    cutmix_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="fraction of mixed pairs that use CutMix if both Mixup and CutMix are enabled",
    )
    probability: float = Field(1, ge=0, le=1, description="probability that a pair is mixed")

    @model_validator(mode="after")
    def _mixes_something(self) -> "Mix":
        if not (self.mixup_alpha or self.cutmix_alpha):
            raise ValueError(
                "mix has no effect: set mixup_alpha or cutmix_alpha, or set mix to null"
            )
        return self

    def draw(self, size: int, rng: np.random.Generator) -> MixDraw:
        """Draw how to mix a pair of `size` x `size` images. "none": they are not mixed.

        The weight is drawn from Beta(alpha, alpha). For CutMix it is then replaced by the exact
        fraction of pixels, because the box is clipped at the edges of the image.
        """
        if rng.random() >= self.probability:
            return MixDraw("none")
        if not (self.mixup_alpha and self.cutmix_alpha):
            cuts = not self.mixup_alpha
        else:
            cuts = rng.random() < self.cutmix_share
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        weight = float(rng.beta(alpha, alpha))
        if not cuts:
            return MixDraw("mixup", weight)
        box = _cut(size, weight, rng)
        return MixDraw("cutmix", 1 - box[2] * box[3] / size**2, box)


def _cut(size: int, weight: float, rng: np.random.Generator) -> Box:
    """Return a random square that covers 1 - `weight` of the area before it is clipped at the
    edges.
    """
    side = round(size * math.sqrt(1 - weight))
    top, left = (int(center) - side // 2 for center in rng.integers(size, size=2))
    bottom, right = min(top + side, size), min(left + side, size)
    top, left = max(top, 0), max(left, 0)
    return top, left, bottom - top, right - left
