"""The base class of training streams, from an indexed split or from tars without an index.

Both kinds of stream yield batches indefinitely. Each rank receives its share of the global batch,
with a cursor and the bad samples found so far.
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
    """Yields batches on `device`, starting at `cursor`.

    A new iteration continues where the previous one stopped. Raises ValueError for a rank outside
    the world or an empty global batch. Iteration raises ValueError, with the list of bad samples,
    if more than `config.max_bad_samples` were found by this rank or are listed in the cursor.
    """

    remedy: ClassVar[str]
    """The first words of the fix for too many bad samples. The message continues with "the shards".
    """

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
        """Yield batches from the current cursor.

        The cursor is read only once, at the start, because workers read ahead of it.
        """

    @abstractmethod
    def _unseen(self, index: int, where: str) -> str:
        """Return a message for a bad sample that was found by another rank or before a resume."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            batches = self._read(pinned=self._device.type == "cuda")
            self._batches = prefetch_to_device(batches, self._device)
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # the next call restarts at this batch
            raise
        self._record(batch.substitutes)
        # Advance the cursor when the trainer receives a batch, not when a worker reads it ahead of
        # time. Otherwise, a run that resumes from a checkpoint would skip batches that were read
        # but not used for training.
        after = replace(self.cursor, samples=self.cursor.samples + self._global_batch)
        self.cursor = after.join(self._bad)
        return replace(batch, cursor=self.cursor)

    def add_bad(self, bad: Iterable[int]) -> None:
        """Add bad samples that other ranks found to the cursor and count them toward the limit.

        Raises the same ValueError as iteration.
        """
        for index in bad:
            if index not in self._bad:
                self._bad[index] = self._unseen(index, "on another rank, see its log")
        self.cursor = self.cursor.join(self._bad)
        self._check_limit()

    def _record(self, substitutes: Iterable[Substitute]) -> None:
        """Log each bad sample when it is first found."""
        for substitute in substitutes:
            if self._bad.get(substitute.index) != substitute.reason:
                self._bad[substitute.index] = substitute.reason
                _log.warning("%s", substitute)
        self._check_limit()

    def _check_limit(self) -> None:
        check_limit(self._bad, self._config.max_bad_samples, remedy=self.remedy)

    def close(self) -> None:
        """Stop the worker processes. Reading the next batch restarts them."""
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError if `rank` is outside the world."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is out of range for world size {world_size}")


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` on `device`.

    On CUDA, the next batch is read and copied on a separate stream before the current one is
    yielded, so that the copy overlaps with the training step. On other devices, batches are yielded
    unchanged.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    ahead = _copy_next(batches, device, copies)
    while ahead is not None:
        computing = torch.cuda.current_stream(device)
        # The copy may still be running. Kernels on the compute stream must not read the batch
        # before the copy is complete.
        computing.wait_stream(copies)
        for tensor in ahead.tensors():
            # The allocator must not reuse this memory for the next copy while kernels are still
            # reading it.
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
