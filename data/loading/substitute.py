"""Selects a substitute for each bad sample in training, and limits the number of bad samples.

The choice depends only on (seed, epoch, index) and the set of bad samples, so it is the same for
every world size. Replacing a sample instead of skipping it preserves the positions of all later
samples in the global order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Content = TypeVar("Content")

_STREAM = 0x73756273  # "subs": separates these random draws from those of augmentation
_ATTEMPTS = 1000
_NAMED = 20


class BadSampleError(ValueError):
    """Raised for a sample that cannot be used for training. The message contains the shard, key and
    reason.
    """


@dataclass(frozen=True)
class Substitute:
    """Sample `index` of the split is bad and was replaced by sample `by`.

    `reason` contains the shard and key. In a stream, `index` is the sample's number, and `by` is
    None because the next sample is used instead.
    """

    index: int
    by: int | None
    reason: str

    def __str__(self) -> str:
        if self.by is None:
            return f"skipped {self.reason}"
        return f"replaced by sample {self.by}: {self.reason}"


def candidates(seed: int, epoch: int, index: int, num_samples: int) -> Iterator[int]:
    """Yield candidate substitutes for `index`."""
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = np.array([seed, _STREAM], dtype=np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    for _ in range(_ATTEMPTS):
        if (candidate := int(rng.integers(num_samples))) != index:
            yield candidate


def read_or_substitute(
    read: Callable[[int], Content], seed: int, epoch: int, index: int, num_samples: int
) -> tuple[Content, Substitute | None]:
    """Return `read(index)`, or the result for the first valid substitute if the sample is bad.

    `read` raises BadSampleError for a bad sample. If a thousand candidates are bad too, the error
    for `index` is raised.
    """
    try:
        return read(index), None
    except BadSampleError as error:
        bad = error
    for candidate in candidates(seed, epoch, index, num_samples):
        try:
            return read(candidate), Substitute(index, candidate, str(bad))
        except BadSampleError:
            continue
    raise bad


def check_limit(bad: Mapping[int, str], limit: int, *, remedy: str) -> None:
    """Raise ValueError, with the list of bad samples, if there are more than `limit`.

    bad: a map from indices to reasons that contain the shard and key. remedy: see
    `EndlessLoader.remedy`.
    """
    if len(bad) <= limit:
        return
    named = "; ".join(list(bad.values())[:_NAMED])
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    raise ValueError(
        f"{len(bad)} bad sample{'s' if len(bad) > 1 else ''} in training, but "
        f"data.max_bad_samples is {limit}: {named}{more}: {remedy} the shards, or raise the "
        "limit"
    )
