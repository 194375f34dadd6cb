"""Batches of pictures or texts: the endless training stream with its cursor, and one pass for
evaluation.

Which sample comes when is `data/loading/order.py` and, for texts, `data/loading/buckets.py`. The
global batches are the same for every world size and number of workers; ranks and workers only take
shares of the reading, which is `data/loading/reader.py`.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from data.config import DataConfig
from data.loading.batch import Batch, Cursor
from data.loading.buckets import ByLength
from data.loading.copy_ahead import copied_ahead
from data.loading.inputs import open_inputs
from data.loading.order import share
from data.loading.reader import EvaluationReader, TrainingReader
from data.loading.substitute import Substitute, check_limit
from data.shards.split import Split

_log = logging.getLogger("kway.data")
_CPU = torch.device("cpu")


class TrainLoader:
    """The training stream from `cursor` on, for ever; iterating again goes on where it stopped.

    Global batch: samples [cursor.samples, cursor.samples + global_batch) of the endless order, of
    which this rank reads `share(step)`. Batches come on `device`. A bad sample is replaced
    (`data/loading/substitute.py`), and so are its later occurrences. Raises ValueError for a split
    without samples, a rank outside the world, or shards and a recipe of different modalities; while
    iterating, with the list where the bad samples that this rank and the cursor know of are more
    than `config.max_bad_samples`.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor,
        device: torch.device = _CPU,
    ) -> None:
        _check_rank(rank, world_size)
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: it must be at least 1")
        self.cursor = cursor
        self._global_batch = global_batch
        self._rank = rank
        self._world_size = world_size
        self._workers = config.workers
        self._device = device
        inputs = open_inputs(config, split.manifest)
        seed = cursor.seed
        num_batches = config.text.batches_by_length if config.text is not None else 1
        order = split.order(seed, config.shuffle_shards, groups_at_once=2 if num_batches > 1 else 1)
        # No longer than a group, so that a window is read from two of them at most.
        num_batches = max(1, min(num_batches, order.samples_at_least // global_batch))
        locate = order.locate
        if num_batches > 1:
            locate = ByLength(
                locate, split.sizes, seed=seed, batch=global_batch, num_batches=num_batches
            ).locate
        self._reader = TrainingReader(split, inputs, config, seed=seed, order=order, locate=locate)
        self._batches: Iterator[Batch] | None = None
        self._limit = config.max_bad_samples
        self._split = split
        self._bad: dict[int, str] = {}
        self._note(cursor.bad, "bad before this run was resumed")

    def share(self, step: int) -> range:
        """Positions of the stream that this rank reads, `step` batches after the cursor."""
        start = self.cursor.samples + step * self._global_batch
        part = share(self._global_batch, self._rank, self._world_size)
        return range(start + part.start, start + part.stop)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            pinned = self._device.type == "cuda"
            batches = self._reader.batches(self._shares(), workers=self._workers, pinned=pinned)
            self._batches = copied_ahead(batches, self._device)
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # asked again, it starts where this batch would
            raise
        self._replaced(batch.substitutes)
        after = replace(self.cursor, samples=self.cursor.samples + self._global_batch)
        self.cursor = after.join(self._bad)
        return replace(batch, cursor=self.cursor)

    def add_bad(self, bad: Iterable[int]) -> None:
        """Take over bad samples that other ranks met, into the limit and into the cursor.

        Raises ValueError as iterating does.
        """
        self._note(bad, "bad on another rank")
        self.cursor = self.cursor.join(self._bad)
        check_limit(self._bad, self._limit)

    def _note(self, bad: Iterable[int], reason: str) -> None:
        for index in bad:
            if index not in self._bad:
                self._bad[index] = str(self._split.bad(index, reason))

    def _replaced(self, substitutes: Iterable[Substitute]) -> None:
        """Log what is bad for the first time; ValueError with the list where it is too much."""
        for substitute in substitutes:
            if substitute.index not in self._bad:
                self._bad[substitute.index] = substitute.reason
                _log.warning("sample %d stands in: %s", substitute.by, substitute.reason)
        check_limit(self._bad, self._limit)

    def _shares(self) -> Iterator[range]:
        """Shares from the present cursor on; workers run ahead of it, so it is read once."""
        first = self.share(0)
        for step in itertools.count():
            yield range(
                first.start + step * self._global_batch, first.stop + step * self._global_batch
            )

    def close(self) -> None:
        """Stop the loader's processes; the next batch would start them again."""
        self._batches = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EvalLoader:
    """One pass over a split: each rank reads a contiguous share, every sample exactly once.

    Texts of a local folder come in the order of their length, so that little of a batch is filling.
    Shares differ by one or are empty, and yet every rank gets the same number of batches (the last
    may be empty), so that collectives inside an evaluation step meet. Raises ValueError as
    `TrainLoader` does.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        _check_rank(rank, world_size)
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        part = share(len(split), rank, world_size)
        inputs = open_inputs(config, split.manifest)
        self._indices = np.arange(part.start, part.stop, dtype=np.int64)
        # Behind a URL, one shard after the other: what is read jumps between few of them.
        by_length = inputs.by_length and split.folder.bytes_at_once is None
        if by_length:
            self._indices = self._indices[np.argsort(split.sizes(self._indices), kind="stable")]
        self._batch = batch
        self._workers = config.workers
        self._device = device
        self._num_batches = -(-len(split) // (world_size * batch))
        self._reader = EvaluationReader(split, inputs, in_order=not by_length)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        starts = (number * self._batch for number in range(len(self)))
        asked = [self._indices[start : start + self._batch] for start in starts]
        pinned = self._device.type == "cuda"
        batches = self._reader.batches(asked, workers=self._workers, pinned=pinned)
        return copied_ahead(batches, self._device)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
