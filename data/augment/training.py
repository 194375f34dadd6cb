"""Converts a decoded image to a training sample with the sample's own random generator.

`AugmentConfig` is the recipe's `data.augment`. Its fields are the augmentations, in the order in
which they are applied: crop or shift, flip, color jitter, grayscale, RandAugment, erasing, and then
user-defined augmentations. Mixing with another sample is applied last, to pairs in the batch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import cv2
import numpy as np
from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from data.augment.base import Augmentation, Box, Fill, random_box, two_draws
from data.augment.color_jitter import ColorJitter
from data.augment.custom import CustomAugmentation, check_imported
from data.augment.erase import Erase
from data.augment.flip import Flip
from data.augment.grayscale import Grayscale
from data.augment.mix import Mix
from data.augment.rand_augment import RandAugment
from data.base_config import FrozenConfig, Interval
from data.images.config import ImageConfig
from data.images.decode import (
    center_crop,
    channels_first,
    checked_jpeg_header,
    decode,
)
from data.images.jpeg_crop import decode_crop


class SizeStage(FrozenConfig):
    """The size of training images up to a given point in the run."""

    size: int = Field(gt=0, le=4096, description="pixels")
    until: Interval = Field(description="end of the stage, measured from the start of the run")


_Imported = Annotated[SerializeAsAny[CustomAugmentation], BeforeValidator(check_imported)]


class AugmentConfig(FrozenConfig):
    """Augmentations of training images, in order. `null` and 0 disable an augmentation.

    Images are cropped first, with a random resized crop (Szegedy et al. 2015) or a shifted center
    crop (He et al. 2016, section 4.2). Random draws are keyed by (seed, epoch, sample), never by
    rank or worker.
    """

    size: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="side of training images in pixels; null selects image.size",
    )
    progressive: tuple[SizeStage, ...] = Field(
        (), description="earlier stages with different image sizes, in order (progressive resizing)"
    )
    crop_area: tuple[float, float] | None = Field(
        (0.08, 1.0),
        description="range of the area of a random crop, as fractions of the image; null selects a "
        "center crop",
    )
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="range of the aspect ratio (width / height) of a random crop"
    )
    pad: int = Field(
        0,
        ge=0,
        le=4096,
        description="maximum random shift in pixels in each direction; requires crop_area=null",
    )
    flip: Flip = Flip(0.5)
    colour: ColorJitter | None = None
    grey: Grayscale = Grayscale(0)
    rand_augment: RandAugment | None = None
    erase: Erase = Erase(0)
    custom: tuple[_Imported, ...] = Field(
        (), description="user-defined augmentations, given by import path and applied in this order"
    )
    mix: Mix | None = None

    @model_validator(mode="after")
    def _ranges_are_possible(self) -> "AugmentConfig":
        low, high = self.crop_area or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_area is [{low}, {high}]: set two fractions with 0 < low <= high <= 1"
            )
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio is [{low}, {high}]: set two numbers with 0 < low <= high")
        if self.pad and self.crop_area is not None:
            raise ValueError(
                f"pad is {self.pad} and crop_area is {list(self.crop_area)}: set pad to 0 or "
                "crop_area to null"
            )
        return self

    def box(self, height: int, width: int, rng: np.random.Generator) -> Box:
        """Return a box with random area and shape.

        If none of ten draws fits, return the largest centered box with an allowed aspect ratio.
        """
        assert self.crop_area is not None
        drawn = random_box(height, width, self.crop_area, self.crop_ratio, rng)
        if drawn is not None:
            return drawn
        low, high = self.crop_ratio
        ratio = min(max(width / height, low), high)
        box_height = max(1, min(height, round(width / ratio)))
        box_width = max(1, min(width, round(height * ratio)))
        return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resized(image: np.ndarray, size: int) -> np.ndarray:
    """Resize [H, W, C] to [size, size, C], twice as fast as the area averaging of evaluation.

    If a side is at least twice `size`, whole blocks of pixels are averaged first. The remaining
    resize uses bilinear interpolation. With Lanczos as the reference, the error is the same as for
    area averaging at scale factors up to 1.5, and within 2 dB of it at factors up to 2.
    """
    height, width = image.shape[:2]
    rows, columns = max(height // size, 1), max(width // size, 1)
    if rows > 1 or columns > 1:
        height, width = height // rows, width // columns
        whole = image[: height * rows, : width * columns]
        image = cv2.resize(whole, (width, height), interpolation=cv2.INTER_AREA)
    drawn = cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR)
    return drawn.reshape(size, size, -1)


@dataclass(frozen=True)
class TrainingImages:
    """Converts image files to training samples [C, size, size].

    The conversion has two steps: `decoded` or `cropped`, and then `augmented`. Only the first one
    can detect a damaged file. Both draw random numbers of the sample, so call them in this order.
    """

    config: ImageConfig
    augment: AugmentConfig

    @cached_property
    def fill(self) -> Fill:
        """The values of pixels that an augmentation leaves empty."""
        return tuple(round(255 * min(max(mean, 0.0), 1.0)) for mean in self.config.mean)

    @cached_property
    def _changes(self) -> list[Augmentation]:
        """The enabled built-in augmentations, in order."""
        fields = vars(self.augment).values()
        changes = [field for field in fields if isinstance(field, Augmentation)]
        # A probability of 0 must still be drawn if other augmentations follow, but not at the end.
        while changes and not self.augment.custom and getattr(changes[-1], "root", None) == 0:
            changes.pop()
        return changes

    @cached_property
    def _padded(self) -> np.ndarray:
        """An image with a border of `fill`, whose middle is replaced for each sample."""
        side = self.config.size + 2 * self.augment.pad
        return np.full((side, side, self.config.channels), self.fill, np.uint8)

    def decoded(self, data: bytes, rng: np.random.Generator) -> np.ndarray:
        """Return the crop, uint8 [size, size, C], of a file, which the next call may overwrite.

        A random crop is drawn first, so that only its pixels are decoded if the image is a JPEG.
        Raises ValueError if the image is damaged or too large.
        """
        config, augment = self.config, self.augment
        header = None if augment.crop_area is None else checked_jpeg_header(data)
        if header is None or not header.upright:
            return self.cropped(decode(data, config.channels), rng)
        box = augment.box(header.height, header.width, rng)
        return resized(decode_crop(data, header, box, config.channels, config.size), config.size)

    def cropped(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Crop an image, uint8 [H, W, C]. Return uint8 [size, size, C], which the next call may
        overwrite.
        """
        size, pad = self.config.size, self.augment.pad
        if self.augment.crop_area is None:
            if image.shape[:2] == (size, size) and self.config.resize in (None, size):
                middle = image  # the usual case for small images, without the calls
            else:
                middle = center_crop(image, self.config)
            if not pad:
                return middle
            self._padded[pad : pad + size, pad : pad + size] = middle
            top, left = two_draws(2 * pad + 1, rng)
            return self._padded[top : top + size, left : left + size]
        top, left, height, width = self.augment.box(image.shape[0], image.shape[1], rng)
        return resized(image[top : top + height, left : left + width], size)

    def augmented(self, crop: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augment a crop. Return uint8 [C, size, size], a view of an array [size, size, C]."""
        drawn = crop[:, :, 0] if self.config.channels == 1 else crop
        for change in self._changes:
            drawn = change(drawn, self.fill, rng)
        for augmentation in self.augment.custom:
            drawn = augmentation.checked(drawn, self.fill, rng)
        return channels_first(drawn)


class ProgressiveSizes:
    """The image size at each point in training: `augment.progressive` and `augment.size`.

    num_samples: per epoch. Raises ValueError if a stage does not end after the previous one.
    """

    def __init__(
        self, image: ImageConfig, augment: AugmentConfig, *, num_samples: int, global_batch: int
    ) -> None:
        self._last = augment.size or image.size
        # For each stage, the number of samples consumed when it ends, and its image size.
        self._stages: list[tuple[int, int]] = []
        for stage in augment.progressive:
            steps = stage.until.in_steps(num_samples=num_samples, global_batch=global_batch)
            self._stages.append((steps * global_batch, stage.size))
        for (before, _), (end, side) in pairwise(self._stages):
            if end <= before:
                raise ValueError(
                    f"data.augment.progressive: the stage of {side} pixels ends at step "
                    f"{end // global_batch}, but the previous stage ends at step "
                    f"{before // global_batch}: list the stages in order, each at least one step "
                    "long"
                )

    def at(self, samples: int) -> int:
        """Return the image size in pixels for the batch that begins after `samples`."""
        return next((side for end, side in self._stages if samples < end), self._last)
