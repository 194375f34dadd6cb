"""How an image becomes a tensor, in a recipe and in a bundle."""

from typing import Literal

from pydantic import Field, model_validator

from data.base_config import FrozenConfig


class ImageConfig(FrozenConfig):
    """How an image becomes a tensor. The bundle contains it, so that serving does the same.

    Evaluation resizes the short side to `resize` and crops `size` x `size` at the center, or at
    several positions; the device computes `(x / 255 - mean) / std`.
    """

    size: int = Field(224, gt=0, le=4096, description="side of the square input, pixels")
    resize: int | None = Field(
        None, gt=0, le=4096, description="short side before the crop; default: size"
    )
    crops: Literal[1, 5, 10] = Field(
        1, description="of evaluation: the centre; and the corners; and all of them mirrored"
    )
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _channel_constants_fit(self) -> "ImageConfig":
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need {self.channels} numbers, one a channel")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        if self.resize is not None and self.resize < self.size:
            raise ValueError(f"resize {self.resize} is smaller than size {self.size}")
        if self.crops > 1 and (self.resize or self.size) == self.size:
            raise ValueError(
                f"crops {self.crops} would all be the same: give a resize above size {self.size}"
            )
        return self

    def scaled_to(self, size: int) -> "ImageConfig":
        """Return the configuration for images with sides of `size` pixels."""
        if size == self.size:
            return self
        resize = self.resize and max(size, round(self.resize * size / self.size))
        return self.model_copy(update={"size": size, "resize": resize})
