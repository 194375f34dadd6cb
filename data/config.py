"""The data section of a recipe.

Images, augmentation and caches are defined in their own modules.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from braceexpand import braceexpand
from pydantic import BeforeValidator, Field, field_validator, model_validator

from data.augment.training import AugmentConfig
from data.base_config import FrozenConfig
from data.images.config import ImageConfig
from data.remote.config import CacheConfig, check_url, is_url

_MAX_STREAM_SHARDS = 1_000_000


class TextConfig(FrozenConfig):
    """How texts are tokenized. The bundle contains the tokenizer."""

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


class StreamConfig(FrozenConfig):
    """Training on webdataset tars without index and manifest, read from front to back.

    docs/data.md lists what this mode does not guarantee. `kway shard index` indexes the tars
    instead.
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
        """All tars, in the order in which they are listed."""
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


class DataConfig(FrozenConfig):
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
        """Size in pixels of the largest training images, which take the most memory."""
        stages = [stage.size for stage in self.augment.progressive]
        return max([self.augment.size or self.image.size, *stages])

    @model_validator(mode="after")
    def _a_stream_has_an_order_of_its_own(self) -> "DataConfig":
        if self.stream is not None and self.shuffle_shards is not None:
            raise ValueError(
                "shuffle_shards is for shards with an index: with data.stream, give stream.buffer"
            )
        return self
