"""The image preprocessing settings in a recipe and in a bundle."""

from typing import Literal

from pydantic import Field, model_validator

from data.base_config import FrozenConfig

Interpolation = Literal["area", "nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


class ImageConfig(FrozenConfig):
    """Image preprocessing. The bundle contains these settings, so that serving and evaluation
    preprocess images in the same way.

    Evaluation resizes the short side to `resize` and crops `size` x `size` pixels at the center or
    at several positions. If `keep_aspect` is false, both sides are resized to `resize`. The device
    computes `(x / 255 - mean) / std`. Imported models set `interpolation`,
    `keep_aspect` and `crop_offset`; random training crops do not use them.
    """

    size: int = Field(224, gt=0, le=4096, description="side of the square input in pixels")
    resize: int | None = Field(
        None, gt=0, le=4096, description="short side in pixels before the crop; default: size"
    )
    interpolation: Interpolation = Field(
        "area",
        description="how evaluation resizes images; area: OpenCV's area averaging to shrink and "
        "bilinear interpolation to enlarge; the others are Pillow's filters, which transformers "
        "and timm use",
    )
    keep_aspect: bool = Field(
        True, description="whether evaluation keeps the aspect ratio when it resizes an image"
    )
    crop_offset: Literal["down", "nearest"] = Field(
        "down",
        description="rounding of the offset of the center crop; down: as in transformers, nearest: "
        "to the nearest integer (a half to the even one), as in timm",
    )
    crops: Literal[1, 5, 10] = Field(
        1,
        description="number of evaluation crops: 1 (center), 5 (center and corners) or 10 "
        "(these five and their mirror images)",
    )
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @model_validator(mode="after")
    def _channel_constants_fit(self) -> "ImageConfig":
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std require {self.channels} numbers each, one per channel")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        if self.resize is not None and self.resize < self.size:
            raise ValueError(
                f"resize is {self.resize}, but size is {self.size}: set resize to at least size"
            )
        if self.crops > 1 and (self.resize or self.size) == self.size:
            raise ValueError(
                f"crops is {self.crops}, but all crops are the same: set resize above size "
                f"{self.size}"
            )
        return self

    def scaled_to(self, size: int) -> "ImageConfig":
        """Return the configuration for images with sides of `size` pixels."""
        if size == self.size:
            return self
        resize = self.resize and max(size, round(self.resize * size / self.size))
        return self.model_copy(update={"size": size, "resize": resize})
