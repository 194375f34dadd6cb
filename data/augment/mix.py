"""Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of the two pictures of a pair.

Positions 2n and 2n + 1 of the endless stream are a pair. One draw, from `pair_rng`, is for both:
each keeps the same share of itself and takes the rest from the other.
"""

import math
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np

from data.augment.crop import Box
from data.config import AugmentConfig, ImageConfig


@dataclass(frozen=True)
class Mix:
    """One draw. weight: the share of a picture's own pixels, which its own label gets as well.

    box: what cutmix takes from the partner, at the same place.
    """

    kind: Literal["none", "mixup", "cutmix"]
    weight: float = 1.0
    box: Box = (0, 0, 0, 0)


def draw_mix(image: ImageConfig, augment: AugmentConfig, rng: np.random.Generator) -> Mix:
    """What a pair shares; of kind "none", with weight 1, where it is not mixed.

    The weight is drawn from Beta(alpha, alpha); that of cutmix is then the exact share of the
    pixels, for its box is cut off at the picture's edges.
    """
    config = augment.mix
    if config is None or rng.random() >= config.probability:
        return Mix("none")
    if not (config.mixup_alpha and config.cutmix_alpha):
        cuts = not config.mixup_alpha
    else:
        cuts = rng.random() < config.cutmix_share
    alpha = config.cutmix_alpha if cuts else config.mixup_alpha
    weight = float(rng.beta(alpha, alpha))
    if not cuts:
        return Mix("mixup", weight)
    box = _cut(image.size, weight, rng)
    return Mix("cutmix", 1 - box[2] * box[3] / image.size**2, box)


def mixed(picture: np.ndarray, partner: np.ndarray, mix: Mix) -> np.ndarray:
    """uint8 [C, H, W] of `picture` with its partner's share; neither is changed."""
    if mix.kind == "mixup":
        # As rows of one matrix: OpenCV takes the last of three axes for channels.
        own, other = (array.reshape(-1, array.shape[-1]) for array in (picture, partner))
        return cv2.addWeighted(own, mix.weight, other, 1 - mix.weight, 0).reshape(picture.shape)
    if mix.kind == "cutmix":
        top, left, height, width = mix.box
        inside = np.s_[:, top : top + height, left : left + width]
        picture = picture.copy()
        picture[inside] = partner[inside]
    return picture


def _cut(size: int, weight: float, rng: np.random.Generator) -> Box:
    """A square of 1 - `weight` of size x size around a random place, cut off at the edges."""
    side = round(size * math.sqrt(1 - weight))
    top, left = (int(place) - side // 2 for place in rng.integers(size, size=2))
    bottom, right = min(top + side, size), min(left + side, size)
    top, left = max(top, 0), max(left, 0)
    return top, left, bottom - top, right - left
