"""What the training streams of an indexed split and of tars without an index share: batches for
ever, each rank its share of the global one, a cursor, and the bad samples met so far.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar, Self

import torch

from data.config import DataConfig
from data.loading.batch import Batch, Cursor
from data.loading.order import share
from data.loading.substitute import Substitute, check_limit

_log = logging.getLogger("kway.data")


class EndlessLoader(ABC):
    """Batches on `device` from `cursor` on; iterating again goes on where it stopped.

    Raises ValueError for a rank outside the world or an empty global batch; while iterating, with
    the list where the bad samples that this rank and the cursor know of are more than
    `config.max_bad_samples`.
    """

    remedy: ClassVar[str]
    """What to do to the shards where too much of them is bad."""

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        cursor: Cursor,
        device: torch.device,
    ) -> None:
        check_rank(rank, world_size)
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: it must be at least 1")
        self.cursor = cursor
        self._config = config
        self._global_batch = global_batch
        self._part = share(global_batch, rank, world_size)
        self._device = device
        self._batches: Iterator[Batch] | None = None
        self._bad = {
            index: self._unseen(index, "before this run was resumed") for index in cursor.bad
        }

    @abstractmethod
    def _read(self, *, pinned: bool) -> Iterator[Batch]:
        """Batches from the present cursor on; workers run ahead of it, so it is read once."""

    @abstractmethod
    def _unseen(self, index: int, where: str) -> str:
        """A line for a bad sample that somebody else met."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            batches = self._read(pinned=self._device.type == "cuda")
            self._batches = prefetch_to_device(batches, self._device)
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # asked again, it starts where this batch would
            raise
        self._note(batch.substitutes)
        after = replace(self.cursor, samples=self.cursor.samples + self._global_batch)
        self.cursor = after.join(self._bad)
        return replace(batch, cursor=self.cursor)

    def add_bad(self, bad: Iterable[int]) -> None:
        """Take over bad samples that other ranks met, into the limit and into the cursor.

        Raises ValueError as iterating does.
        """
        for index in bad:
            if index not in self._bad:
                self._bad[index] = self._unseen(index, "on another rank, whose log names it")
        self.cursor = self.cursor.join(self._bad)
        self._check_limit()

    def _note(self, met: Iterable[Substitute]) -> None:
        """Log what is bad for the first time."""
        for one in met:
            if self._bad.get(one.index) != one.reason:
                self._bad[one.index] = one.reason
                _log.warning("%s", one)
        self._check_limit()

    def _check_limit(self) -> None:
        check_limit(self._bad, self._config.max_bad_samples, remedy=self.remedy)

    def close(self) -> None:
        """Stop the loader's processes; the next batch would start them again."""
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_rank(rank: int, world_size: int) -> None:
    """ValueError for a rank outside the world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """`batches` on `device`. On CUDA the next one is read and copied, on a stream of its own,
    before one is handed out; elsewhere they are handed on as they come.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    ahead = _copy_next(batches, device, copies)
    while ahead is not None:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(copies)
        for tensor in ahead.tensors():
            # Its memory may not be used again for a copy before what computes with it has ended.
            tensor.record_stream(computing)
        ready, ahead = ahead, _copy_next(batches, device, copies)
        yield ready


def _copy_next(
    batches: Iterator[Batch], device: torch.device, copies: torch.cuda.Stream
) -> Batch | None:
    batch = next(batches, None)
    if batch is None:
        return None
    with torch.cuda.stream(copies):
        return batch.to(device)
