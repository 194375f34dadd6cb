"""The worker processes with which a loader reads ahead."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data.loading.batch import Batch
from data.processes import die_with_parent
from data.retry import TransientError

_LOST_WORKER = (
    "a loader process was killed, possibly because it ran out of memory: lower data.workers or "
    "train.global_batch, or check the system log for the cause"
)
_SMALL_SHM = (
    "/dev/shm is too small for the batches of the loader processes: raise --shm-size (or the "
    "sizeLimit of the volume at /dev/shm), or lower data.workers"
)

# The number of batches per worker that are requested or ready ahead of the trainer.
_PREFETCHED = 2
# In addition, the worker fills one batch and the trainer copies one.
NUM_SLOTS = _PREFETCHED + 2
"""The number of batches of a worker that exist at the same time."""


def read_ahead(
    reader: Dataset, requests: Iterable[Any] | None, *, workers: int, pinned: bool
) -> Iterator[Batch]:
    """Yield the batches of `reader` in order. `workers` processes read batches ahead.

    requests: one request per batch, or None for an iterable reader. Raises the errors that the
    reader returns, TransientError if a process was killed, and ValueError if /dev/shm is too small.
    """
    loader = DataLoader(
        reader,
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PREFETCHED if workers else None,
        pin_memory=pinned,
        # Use a separate generator. The loader draws a seed, and this must not advance the trainer's
        # global generator.
        generator=torch.Generator(),
        worker_init_fn=partial(begin_worker, parent=os.getpid()) if workers else None,
    )
    for batch in _received(loader):
        if isinstance(batch, Exception):
            raise batch
        # Pinning has already copied the batch out of the worker's memory.
        yield batch if pinned or not workers else _own(batch)


def _received(loader: DataLoader) -> Iterator[Batch | Exception]:
    """Yield the results that the workers send. Raises the errors of `read_ahead`."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise TransientError(_LOST_WORKER) from error
    except RuntimeError as error:
        if (reason := lost_worker(error)) is None:
            raise
        # A larger limit is needed, so a restart would fail again.
        kind = ValueError if reason == _SMALL_SHM else TransientError
        raise kind(reason) from error


def _own(batch: Batch) -> Batch:
    """Copy the pixels to memory that no worker writes to."""
    if (pixels := batch.inputs.get("pixel_values")) is None:
        return batch
    return replace(batch, inputs={**batch.inputs, "pixel_values": pixels.clone()})


def lost_worker(error: RuntimeError) -> str | None:
    """Return what to print if `error` is torch's report of a killed or failed worker, or None.

    torch's signal handler can raise this error at any point in the program.
    """
    text = str(error)
    # The kernel kills a process that writes to a full /dev/shm with SIGBUS, unless torch can
    # reserve the memory, which then fails with an error.
    if "Bus error" in text or "shared memory(shm)" in text:
        return _SMALL_SHM
    return _LOST_WORKER if text.startswith("DataLoader worker") else None


def begin_worker(_number: int, *, parent: int) -> None:
    """Make a new worker exit when its rank, the process `parent`, exits.

    torch itself checks only every five seconds. The worker gets its own process group, because a
    launcher signals the entire process group of a rank, but the rank still needs its workers to
    finish the step and save a checkpoint.
    """
    os.setpgrp()
    die_with_parent(parent)
