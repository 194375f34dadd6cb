"""Converts a decoded image to a training sample. All random draws use the sample's own
generator.

`AugmentConfig` is the recipe's `data.augment`. Its fields are the augmentations, in the order in
which they are applied: crop or shift, flip, color jitter, grayscale, RandAugment, erasing, and then
user-defined augmentations. Mixing with another sample is applied last, to pairs in the batch.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field, SerializeAsAny

from data.augment.base import Augmentation, Draws, Fill
from data.augment.color_jitter import ColorJitter
from data.augment.crop import Crop
from data.augment.custom import CustomAugmentation, check_imported
from data.augment.erase import Erase
from data.augment.flip import Flip
from data.augment.grayscale import Grayscale
from data.augment.mix import Mix
from data.augment.rand_augment import RandAugment
from data.base_config import FrozenConfig, Interval
from data.images.config import ImageConfig
from data.images.decode import channels_first, contiguous


class SizeStage(FrozenConfig):
    """The size of training images up to a given point in the run."""

    size: int = Field(gt=0, le=4096, description="pixels")
    until: Interval = Field(description="end of the stage, measured from the start of the run")


class _Sizes(FrozenConfig):
    size: int | None = Field(
        None,
        gt=0,
        le=4096,
        description="side of training images in pixels; null selects image.size",
    )
    progressive: tuple[SizeStage, ...] = Field(
        (), description="earlier stages with different image sizes, in order (progressive resizing)"
    )


_Imported = Annotated[SerializeAsAny[CustomAugmentation], BeforeValidator(check_imported)]


class AugmentConfig(Crop, _Sizes):
    """Augmentations of training images, in the order in which they are applied. `null` and 0
    disable an augmentation.

    Random draws are keyed by (seed, epoch, sample), never by rank or worker.
    """

    flip: Flip = Flip(0.5)
    colour: ColorJitter | None = None
    grey: Grayscale = Grayscale(0)
    rand_augment: RandAugment | None = None
    erase: Erase = Erase(0)
    custom: tuple[_Imported, ...] = Field(
        (), description="user-defined augmentations, given by import path and applied in this order"
    )
    mix: Mix | None = None

    @property
    def changes(self) -> list[Augmentation]:
        """The enabled built-in augmentations of a single image, in order."""
        return [field for field in vars(self).values() if isinstance(field, Augmentation)]


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
        return self.augment.changes

    def decoded(self, data: bytes, rng: Draws) -> np.ndarray:
        """Return the decoded crop, uint8 [size, size, C]. Raises ValueError for a damaged image."""
        return self.augment.decoded(data, self.config, self.fill, rng)

    def cropped(self, image: np.ndarray, rng: Draws) -> np.ndarray:
        """Crop an image, uint8 [H, W, C]. Return uint8 [size, size, C]."""
        return self.augment.cropped(image, self.config, self.fill, rng)

    def augmented(self, crop: np.ndarray, rng: Draws) -> np.ndarray:
        """Augment a crop. Return uint8 [C, size, size], a view of an array [size, size, C]."""
        drawn = crop[:, :, 0] if self.config.channels == 1 else crop
        for change in self._changes:
            drawn = change(drawn, self.fill, rng)
        if self.augment.custom:
            generator = rng.generator()
            for augmentation in self.augment.custom:
                drawn = augmentation.checked(drawn, self.fill, generator)
        return channels_first(drawn)


def for_training(
    image: np.ndarray, config: ImageConfig, augment: AugmentConfig, rng: Draws
) -> np.ndarray:
    """Augment an image uint8 [H, W, C] and return a new array uint8 [C, size, size]."""
    images = TrainingImages(config, augment)
    return contiguous(images.augmented(images.cropped(image, rng), rng))


class ProgressiveSizes:
    """The image size at each point in training, given by `augment.progressive` and
    `augment.size`.

    num_samples: the number of samples per epoch. Raises ValueError if a stage does not end after
    the previous stage.
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
