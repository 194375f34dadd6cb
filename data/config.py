"""The data section of a recipe.

Images, augmentation and caches are defined in their own modules.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from braceexpand import braceexpand
from pydantic import BeforeValidator, Field, field_validator, model_validator

from data.augment.training import AugmentConfig
from data.base_config import FrozenConfig
from data.images.config import ImageConfig
from data.remote.config import CacheConfig, check_url, folder_or_url, is_url

_MAX_STREAM_SHARDS = 1_000_000


ShardFolder = Annotated[
    Path | str,
    BeforeValidator(lambda value: folder_or_url(value) if isinstance(value, str) else value),
]


class TextConfig(FrozenConfig):
    """How texts are tokenized. The bundle contains the tokenizer."""

    tokenizer: str = Field(
        min_length=1,
        description="tokenizer folder, as written by kway tokenizer, or hub:NAME for the hub",
    )
    max_length: int = Field(
        128,
        ge=1,
        le=32_768,
        description="maximum number of tokens per text, including special tokens",
    )
    batches_by_length: int = Field(
        50,
        ge=1,
        le=1000,
        description="number of batches whose texts are sorted together by length, limited to one "
        "epoch or, with shuffle_shards, to one group; 1 disables sorting",
    )


class StreamConfig(FrozenConfig):
    """Training on webdataset tars without an index or a manifest, read sequentially.

    docs/layouts.md lists the guarantees that this mode lacks and `kway shard index` provides.
    """

    shards: str | tuple[str, ...] = Field(
        description="paths or URLs of tars; {000..255} and {a,b} are expanded"
    )
    samples: int = Field(
        gt=0, description="number of samples per epoch, used for durations in epochs"
    )
    label_field: str = Field(
        "label",
        description="field of `<key>.json` that contains the label, if there is no `<key>.cls`",
    )
    sample: str | None = Field(
        None,
        description="extension of the sample file, if several files with the same key are "
        "candidates",
    )
    buffer: int = Field(
        5000,
        ge=1,
        le=10_000_000,
        description="size of the shuffle buffer of each loader process, in samples",
    )

    @field_validator("shards")
    @classmethod
    def _are_tars(cls, shards: str | tuple[str, ...]) -> str | tuple[str, ...]:
        seen: set[str] = set()
        for shard in _expanded(shards):
            if shard.startswith("pipe:"):
                raise ValueError(f"{shard} would run a command: set a path or a URL")
            if is_url(shard):
                check_url(shard)
            if shard in seen:
                raise ValueError(f"{shard} is listed twice: list each tar once")
            seen.add(shard)
            if len(seen) > _MAX_STREAM_SHARDS:
                raise ValueError(f"more than {_MAX_STREAM_SHARDS:,} tars: check the braces")
        if not seen:
            raise ValueError("the list of tars is empty: set paths or URLs")
        return shards

    @property
    def addresses(self) -> tuple[str, ...]:
        """All tars, in the listed order."""
        return tuple(_expanded(self.shards))


class SamplingConfig(FrozenConfig):
    """How often training draws the samples of each class (`data/loading/sampling.py`)."""

    power: float = Field(
        1,
        ge=0,
        le=1,
        description="a class with n training samples is drawn with a probability proportional to "
        "n^power; 1: natural, 0.5: square root, 0: class-balanced",
    )
    epoch_samples: int | None = Field(
        None,
        ge=1,
        le=2**36,
        description="number of samples per epoch; null selects the number of training samples",
    )


class MixtureSet(FrozenConfig):
    """One of several shard sets on which a run trains."""

    shards: ShardFolder = Field(description="folder or URL, as in data.shards")
    split: str = Field("train", description="split of the folder to train on")
    weight: float = Field(
        1,
        gt=0,
        le=1e9,
        description="relative number of samples drawn from this set, regardless of its size",
    )


def _expanded(shards: str | tuple[str, ...]) -> Iterator[str]:
    for pattern in (shards,) if isinstance(shards, str) else shards:
        try:
            yield from braceexpand(pattern)
        except ValueError as error:
            raise ValueError(
                f"{pattern}: {error}: use braces as in train-{{000..255}}.tar"
            ) from error


class DataConfig(FrozenConfig):
    shards: ShardFolder = Field(
        description="folder written by `kway shard`: a path, or a URL (file://, http://, https://, "
        "s3://, gs://)"
    )
    cache: CacheConfig = CacheConfig()
    shuffle_shards: int | None = Field(
        None,
        ge=1,
        description="number of shards that are shuffled together; null selects all shards (global "
        "shuffle)",
    )
    stream: StreamConfig | None = Field(
        None, description="unindexed tars to train on instead of `train_split`"
    )
    mixture: tuple[MixtureSet, ...] = Field(
        (),
        description="shard sets to train on instead of `train_split`; `shards` still provides the "
        "evaluation split",
    )
    sampling: SamplingConfig = SamplingConfig()
    train_split: str = "train"
    eval_split: str = "test"
    image: ImageConfig = ImageConfig()
    augment: AugmentConfig = AugmentConfig()
    text: TextConfig | None = Field(None, description="tokenization settings for text shards")
    workers: int = Field(
        0,
        ge=0,
        description="number of loader processes per rank; 0 loads samples in the training process",
    )
    max_bad_samples: int = Field(
        10,
        ge=0,
        le=10_000,
        description="maximum number of distinct damaged samples that training replaces; one more "
        "stops training with an error (0: the first one stops it)",
    )

    @property
    def largest_side(self) -> int:
        """The side, in pixels, of the largest training images, which require the most memory."""
        stages = [stage.size for stage in self.augment.progressive]
        return max([self.augment.size or self.image.size, *stages])

    @model_validator(mode="after")
    def _options_fit_together(self) -> "DataConfig":
        key = "data.mixture" if self.mixture else "data.sampling"
        if self.stream is not None and self.shuffle_shards is not None:
            raise ValueError(
                "shuffle_shards requires shards with an index: remove it and set "
                "data.stream.buffer instead"
            )
        if self.is_sampled and self.stream is not None:
            raise ValueError(
                f"{key} requires shards with an index: remove it, or run kway shard index and "
                "remove data.stream"
            )
        if self.is_sampled and self.shuffle_shards is not None:
            raise ValueError(
                f"{key} draws from all shards at the same time: remove data.shuffle_shards"
            )
        return self

    @property
    def addresses(self) -> list[str]:
        """The path or URL of `shards`, followed by those of the sets of `mixture`."""
        return [str(self.shards), *(str(one.shards) for one in self.mixture)]

    @property
    def is_sampled(self) -> bool:
        """Whether training draws given shares of classes or shard sets
        (`data/loading/sampling.py`). Otherwise, every epoch is a permutation of the training split.
        """
        return bool(self.mixture) or self.sampling != SamplingConfig()
