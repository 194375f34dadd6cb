"""The worker processes with which a loader reads ahead."""

import os

from data.processes import die_with_parent

LOST_WORKER = (
    "a loader process was killed, possibly because it ran out of memory: lower data.workers or "
    "train.global_batch, or check the system log for the cause"
)
SMALL_SHM = (
    "/dev/shm is too small for the batches of the loader processes: raise --shm-size (or the "
    "sizeLimit of the volume at /dev/shm), or lower data.workers"
)

# The number of batches per worker that are requested or ready ahead of the trainer.
PREFETCHED = 2
# In addition, the worker fills one batch and the trainer copies one.
NUM_SLOTS = PREFETCHED + 2
"""The number of batches of a worker that exist at the same time."""


def lost_worker(error: RuntimeError) -> str | None:
    """Return what to print if `error` is torch's report of a killed or failed worker, or None.

    torch's signal handler can raise this error at any point in the program.
    """
    text = str(error)
    # The kernel kills a process that writes to a full /dev/shm with SIGBUS, unless torch can
    # reserve the memory, which then fails with an error.
    if "Bus error" in text or "shared memory(shm)" in text:
        return SMALL_SHM
    return LOST_WORKER if text.startswith("DataLoader worker") else None


def begin_worker(_number: int, *, parent: int) -> None:
    """Make a new worker exit when its rank, the process `parent`, exits.

    torch itself checks only every five seconds. The worker gets its own process group, because a
    launcher signals the entire process group of a rank, but the rank still needs its workers to
    finish the step and save a checkpoint.
    """
    os.setpgrp()
    die_with_parent(parent)
