"""What a recipe may say about data. Free of torch and image libraries: it loads at once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from braceexpand import braceexpand
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from data.duration import Interval
from data.remote.address import check_url, is_url

_MAX_STREAM_SHARDS = 1_000_000


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ImageConfig(_Config):
    """How a picture becomes a tensor; travels in the bundle: serving sees what training saw.

    Evaluation resizes the short side to `resize`, crops the centre `size` x `size`, or several
    places, and the device computes `(x / 255 - mean) / std`.
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
        """The same picture with sides of `size` pixels."""
        if size == self.size:
            return self
        resize = self.resize and max(size, round(self.resize * size / self.size))
        return self.model_copy(update={"size": size, "resize": resize})


class SizeStage(_Config):
    """The side of training pictures until so much of the run is done."""

    size: int = Field(gt=0, le=4096, description="pixels")
    until: Interval = Field(description="counted from the start of the run")


class ColourConfig(_Config):
    """Colour jitter: the four in random order; strengths mean what torchvision's ColorJitter does.

    Brightness, contrast and saturation are multiplied by 1 - strength to 1 + strength, the hue
    moves by up to `hue` of the colour circle. A picture of one channel has no saturation or hue.
    """

    brightness: float = Field(0, ge=0)
    contrast: float = Field(0, ge=0)
    saturation: float = Field(0, ge=0)
    hue: float = Field(0, ge=0, le=0.5)
    probability: float = Field(1, ge=0, le=1)

    @model_validator(mode="after")
    def _changes_something(self) -> "ColourConfig":
        if not (self.brightness or self.contrast or self.saturation or self.hue):
            raise ValueError(
                "colour changes nothing: give brightness, contrast, saturation or hue, or null"
            )
        return self


class RandAugmentConfig(_Config):
    """RandAugment (Cubuk et al. 2020) on the paper's scale; timm's is the same.

    torchvision's runs to 30 instead of 10: its magnitude 9 is 3 here.
    """

    operations: int = Field(2, ge=1, le=14, description="how many, one after the other")
    magnitude: float = Field(9, ge=0, le=10, description="how strong each of them is")


class MixConfig(_Config):
    """Mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) of neighbours in the stream.

    Shares are drawn from Beta(alpha, alpha); 0 turns that one off.
    """

    mixup_alpha: float = Field(0, ge=0, le=1000)
    cutmix_alpha: float = Field(0, ge=0, le=1000)
    cutmix_share: float = Field(
        0.5, ge=0, le=1, description="of the mixed pairs, where both of them are on"
    )
    probability: float = Field(1, ge=0, le=1, description="that a pair is mixed")

    @model_validator(mode="after")
    def _mixes_something(self) -> "MixConfig":
        if not (self.mixup_alpha or self.cutmix_alpha):
            raise ValueError("mix changes nothing: give mixup_alpha or cutmix_alpha, or null")
        return self


class AugmentConfig(_Config):
    """What training changes at random, in this order; `null` and 0 turn a part off.

    Draws are keyed by (seed, epoch, sample), never by rank or worker.
    """

    size: int | None = Field(
        None, gt=0, le=4096, description="side of training pictures, pixels; null: image.size"
    )
    progressive: tuple[SizeStage, ...] = Field(
        (), description="sides before that, one after the other (progressive resizing)"
    )
    crop_area: tuple[float, float] | None = Field(
        (0.08, 1.0),
        description="share of the picture's area that a random crop keeps; null: centre",
    )
    crop_ratio: tuple[float, float] = Field(
        (3 / 4, 4 / 3), description="width / height of the crop"
    )
    pad: int = Field(
        0,
        ge=0,
        le=4096,
        description="pixels of a random shift at most, either way; needs crop_area null",
    )
    flip: float = Field(0.5, ge=0, le=1, description="probability of a left-right flip")
    colour: ColourConfig | None = None
    grey: float = Field(0, ge=0, le=1, description="probability that a picture loses its colour")
    rand_augment: RandAugmentConfig | None = None
    erase: float = Field(
        0, ge=0, le=1, description="probability that a box of it is covered with `image.mean`"
    )
    mix: MixConfig | None = None

    @model_validator(mode="after")
    def _ranges_are_possible(self) -> "AugmentConfig":
        low, high = self.crop_area or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_area is [{low}, {high}]: give two shares, 0 < low <= high <= 1")
        low, high = self.crop_ratio
        if not 0 < low <= high:
            raise ValueError(f"crop_ratio is [{low}, {high}]: give two numbers, 0 < low <= high")
        if self.pad and self.crop_area is not None:
            raise ValueError(
                f"pad is {self.pad} and crop_area {list(self.crop_area)}: set one to null or 0"
            )
        return self


class TextConfig(_Config):
    """How a text becomes tokens; the tokenizer travels in the bundle."""

    tokenizer: str = Field(
        min_length=1,
        description="folder, such as kway tokenizer makes; hub:NAME is one of the hub",
    )
    max_length: int = Field(
        128, ge=1, le=32_768, description="tokens a text keeps, the special ones among them"
    )
    batches_by_length: int = Field(
        50,
        ge=1,
        le=1000,
        description="batches of texts that are sorted by length together, an epoch's at most and, "
        "under shuffle_shards, a group's; 1: as they come",
    )


class CacheConfig(_Config):
    """Where all processes of a machine keep the shards of a URL; a local folder needs none."""

    folder: Path = Field(Path("~/.cache/kway/shards"), description="on a disk of this machine")
    gigabytes: float = Field(50, gt=0, description="of that disk at most; 1 GB is 10^9 bytes")
    attempts: int = Field(
        8, ge=1, le=100, description="to fetch a file where the network or the server fails"
    )

    @property
    def max_bytes(self) -> int:
        return int(self.gigabytes * 1e9)


class StreamConfig(_Config):
    """Training on webdataset tars without index and manifest, read from front to back.

    What it cannot promise stands in docs/data.md; `kway shard index` makes shards that need none
    of this.
    """

    shards: str | tuple[str, ...] = Field(
        description="paths or URLs of tars; {000..255} and {a,b} in them are expanded"
    )
    samples: int = Field(gt=0, description="what counts as an epoch in durations")
    label_field: str = Field("label", description="of `<key>.json`, where there is no `<key>.cls`")
    sample: str | None = Field(
        None, description="the extension that is the sample, where there are several"
    )
    buffer: int = Field(
        5000, ge=1, le=10_000_000, description="samples that a loader process shuffles at a time"
    )

    @field_validator("shards")
    @classmethod
    def _are_tars(cls, shards: str | tuple[str, ...]) -> str | tuple[str, ...]:
        seen: set[str] = set()
        for shard in _expanded(shards):
            if shard.startswith("pipe:"):
                raise ValueError(f"{shard} would run a command: give a path or a URL")
            if is_url(shard):
                check_url(shard)
            if shard in seen:
                raise ValueError(f"{shard} stands there twice: name each tar once")
            seen.add(shard)
            if len(seen) > _MAX_STREAM_SHARDS:
                raise ValueError(f"more than {_MAX_STREAM_SHARDS:,} tars: correct the braces")
        if not seen:
            raise ValueError("no tar is named: give paths or URLs")
        return shards

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every tar, in the order they are named."""
        return tuple(_expanded(self.shards))


def _expanded(shards: str | tuple[str, ...]) -> Iterator[str]:
    for pattern in (shards,) if isinstance(shards, str) else shards:
        try:
            yield from braceexpand(pattern)
        except ValueError as error:
            raise ValueError(f"{pattern}: {error}: write it as train-{{000..255}}.tar") from error


def _path_or_url(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return check_url(value) if is_url(value) else Path(value)


class DataConfig(_Config):
    shards: Annotated[Path | str, BeforeValidator(_path_or_url)] = Field(
        description="folder with manifest.json, made by `kway shard`: a path, or a URL "
        "(file://, http://, https://, s3://, gs://)"
    )
    cache: CacheConfig = CacheConfig()
    shuffle_shards: int | None = Field(
        None,
        ge=1,
        description="shards whose samples are mixed at a time; null: all, a global shuffle",
    )
    stream: StreamConfig | None = Field(
        None, description="train on tars without an index instead of on `train_split`"
    )
    train_split: str = "train"
    eval_split: str = "test"
    image: ImageConfig = ImageConfig()
    augment: AugmentConfig = AugmentConfig()
    text: TextConfig | None = Field(None, description="for shards of texts")
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

    @property
    def largest_side(self) -> int:
        """Pixels of the largest pictures of training, which take the most memory."""
        stages = [stage.size for stage in self.augment.progressive]
        return max([self.augment.size or self.image.size, *stages])

    @model_validator(mode="after")
    def _a_stream_has_an_order_of_its_own(self) -> "DataConfig":
        if self.stream is not None and self.shuffle_shards is not None:
            raise ValueError(
                "shuffle_shards is for shards with an index: with data.stream, give stream.buffer"
            )
        return self
