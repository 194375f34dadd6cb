"""The processes of a loader: batches read ahead by workers, and the memory that they write to."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.loading.batch import Batch
from data.processes import die_with_parent
from data.retry import TransientError

LOST_WORKER = (
    "a loader process was ended from outside, perhaps for want of memory: lower data.workers or "
    "train.global_batch, or find who ended it"
)

# Batches that a loader process has made, or is told to make, before the trainer takes the next one.
PREFETCHED = 2
# Besides them, one is being made and one is being copied.
_NUM_SLOTS = PREFETCHED + 2


def read_ahead(
    reader: Dataset, asked: Iterable[Any] | None, *, workers: int, pinned: bool
) -> Iterator[Batch]:
    """The batches of `reader` in order, read ahead by `workers` processes.

    Raises the errors that the reader returns, and TransientError if a process was killed.
    """
    loader = DataLoader(
        reader,
        sampler=asked,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        pin_memory=pinned,
        # Its own generator: the loader draws a seed, which must not move the trainer's global one.
        generator=torch.Generator(),
        worker_init_fn=partial(begin_worker, parent=os.getpid()) if workers else None,
    )
    for batch in _received(loader):
        if isinstance(batch, Exception):
            raise batch
        # Pinning has already copied it.
        yield batch if pinned or not workers else _own(batch)


def _received(loader: DataLoader) -> Iterator[Batch | Exception]:
    """What the loader's processes send; TransientError if one of them was killed."""
    try:
        yield from loader
    except (RuntimeError, ConnectionError, EOFError) as error:
        # torch raises RuntimeError from a signal handler, unless the pipe breaks first.
        if isinstance(error, RuntimeError) and not is_lost_worker(error):
            raise
        raise TransientError(LOST_WORKER) from error


def _own(batch: Batch) -> Batch:
    """With its pixels in memory that no loader process writes to."""
    if (pixels := batch.inputs.get("pixel_values")) is None:
        return batch
    return replace(batch, inputs={**batch.inputs, "pixel_values": pixels.clone()})


def is_lost_worker(error: RuntimeError) -> bool:
    """Whether it is torch's word for a loader process that was ended; its signal handler may raise
    it anywhere in the process."""
    return str(error).startswith("DataLoader worker")


def begin_worker(_number: int, *, parent: int) -> None:
    """Bind a new loader process to the rank `parent`; torch looks after that every five seconds.

    In a process group of its own: a launcher signals a rank's whole group, and the rank needs its
    loader to finish the step and save.
    """
    os.setpgrp()
    die_with_parent(parent)


class PixelMemory:
    """Where the batches of one process are made. Not sent to other processes: each has its own."""

    def __init__(self) -> None:
        self._slots: list[torch.UntypedStorage | None] = [None] * _NUM_SLOTS
        self._next_slot = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """uint8 of `shape`, to be filled. In a loader process it is shared with the trainer, and
        written to anew `PREFETCHED` + 2 batches later: the trainer copies it before that."""
        if get_worker_info() is None:
            return torch.empty(shape, dtype=torch.uint8)
        size = math.prod(shape)
        self._next_slot = (self._next_slot + 1) % _NUM_SLOTS
        slot = self._slots[self._next_slot]
        if slot is None or slot.nbytes() < size:
            # As torch's own collating does in a loader process.
            slot = self._slots[self._next_slot] = torch.UntypedStorage._new_shared(size)
        pixels = torch.empty(0, dtype=torch.uint8)
        return pixels.set_(slot, 0, shape)  # type: ignore[call-overload]

    def __reduce__(self) -> tuple[type["PixelMemory"], tuple[()]]:
        return PixelMemory, ()
