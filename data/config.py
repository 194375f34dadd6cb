"""The data section of a recipe.

Images, augmentation and caches are defined in their own modules.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from data.augment.training import AugmentConfig
from data.base_config import FrozenConfig
from data.images.config import ImageConfig
from data.remote.config import CacheConfig, folder_or_url


def _path_or_url(value: Any) -> Any:
    return folder_or_url(value) if isinstance(value, str) else value


ShardFolder = Annotated[Path | str, BeforeValidator(_path_or_url)]


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
        if self.is_sampled and self.shuffle_shards is not None:
            key = "data.mixture" if self.mixture else "data.sampling"
            raise ValueError(
                f"{key} draws from all shards at the same time: remove data.shuffle_shards"
            )
        return self

    @model_validator(mode="after")
    def _sets_are_distinct(self) -> "DataConfig":
        seen: set[tuple[str, str]] = set()
        for one in self.mixture:
            if (found := (str(one.shards), one.split)) in seen:
                raise ValueError(
                    f"data.mixture lists split {one.split} of {one.shards} twice: list it once, "
                    "with the sum of the weights"
                )
            seen.add(found)
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
