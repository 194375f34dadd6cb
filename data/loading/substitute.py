"""Which sample stands in for a bad one in training, and how many may be bad.

A function of (seed, epoch, index) and of which samples are bad: the same on every topology.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Content = TypeVar("Content")

_STREAM = 0x73756273  # "subs": keeps these draws apart from those of augmentation
_ATTEMPTS = 1000
_NAMED = 20


class BadSampleError(ValueError):
    """A sample that cannot be trained on; the message names shard, key and reason."""


@dataclass(frozen=True)
class Substitute:
    """Sample `index` of the split is bad and `by` stood in; `reason` names shard and key.

    Of a stream `index` is its number there, and `by` None: the next one follows.
    """

    index: int
    by: int | None
    reason: str

    def __str__(self) -> str:
        if self.by is None:
            return f"left out: {self.reason}"
        return f"sample {self.by} stands in: {self.reason}"


def candidates(seed: int, epoch: int, index: int, num_samples: int) -> Iterator[int]:
    """Samples that may stand in for `index`, one after the other."""
    counter = np.array([0, index, epoch, 0], dtype=np.uint64)
    key = np.array([seed, _STREAM], dtype=np.uint64)
    rng = np.random.Generator(np.random.Philox(key=key, counter=counter))
    for _ in range(_ATTEMPTS):
        if (candidate := int(rng.integers(num_samples))) != index:
            yield candidate


def read_sound(
    read: Callable[[int], Content], seed: int, epoch: int, index: int, num_samples: int
) -> tuple[Content, Substitute | None]:
    """What `read` gives for `index`, or for the first sound one that may stand in for it.

    `read` raises BadSampleError; the first one goes on up where a thousand others are bad, too.
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
    """Raise ValueError with the list where more samples than `limit` are bad.

    `bad`: index -> a reason that names shard and key; remedy: what to do to the shards.
    """
    if len(bad) <= limit:
        return
    named = "; ".join(list(bad.values())[:_NAMED])
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    raise ValueError(
        f"{len(bad)} bad sample{'s' if len(bad) > 1 else ''} in training, and "
        f"data.max_bad_samples is {limit}: {named}{more}: {remedy} the shards or raise the "
        "limit"
    )
