"""What a recipe may say about data. Free of torch and image libraries: it loads at once."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ImageConfig(_Config):
    """How a picture becomes a tensor; travels in the bundle: serving sees what training saw.

    Evaluation resizes the short side to `resize`, crops the centre `size` x `size`, and the
    device computes `(x / 255 - mean) / std`.
    """

    size: int = Field(224, gt=0, le=4096, description="side of the square input, pixels")
    resize: int | None = Field(
        None, gt=0, le=4096, description="short side before the crop; default: size"
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
        return self


class AugmentConfig(_Config):
    """Random crop and flip; draws are keyed by (seed, epoch, sample), never by rank or worker."""

    crop_area: tuple[float, float] | None = Field(
        (0.08, 1.0),
        description="share of the picture's area that a random crop keeps; null: centre",
    )
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="width / height of the crop"
    )
    flip: float = Field(0.5, ge=0, le=1, description="probability of a left-right flip")

    @model_validator(mode="after")
    def _ranges_are_possible(self) -> "AugmentConfig":
        low, high = self.crop_area or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_area is [{low}, {high}]: give two shares, 0 < low <= high <= 1")
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio is [{low}, {high}]: give two numbers, 0 < low <= high")
        return self


class DataConfig(_Config):
    shards: Path = Field(description="folder with manifest.json, made by `kway shard`")
    train_split: str = "train"
    eval_split: str = "test"
    image: ImageConfig = ImageConfig()
    augment: AugmentConfig = AugmentConfig()
    workers: int = Field(
        0, ge=0, description="loader processes a rank; 0 loads in the trainer itself"
    )
    max_bad_samples: int = Field(
        10,
        ge=0,
        le=10_000,
        description="different samples that training may meet and replace because they are "
        "damaged; one more stops it, 0 stops at the first",
    )
