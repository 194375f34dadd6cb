"""Exchanges messages about a checkpoint between ranks, as JSON and without pickle. Also creates the
error messages for disk failures; each gives the reason, the free space and the fix.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

from data.retry import ATTEMPTS, RetriesExhaustedError
from heads.collectives import all_gather_equal, all_gather_rows

# The ranks raise an error of another rank as the first of these types that matches it.
_TYPES = {
    kind.__name__: kind for kind in (FileNotFoundError, RetriesExhaustedError, OSError, ValueError)
}


def exchange(message: Any, group: ProcessGroup | None) -> list[Any]:
    """Return every rank's message, in rank order (collective). Uses CPU tensors, so `group` may be
    a gloo group."""
    body = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in all_gather_equal(torch.tensor([len(body)]), group)]
    joined = all_gather_rows(body, sizes, group)
    return [json.loads(part.numpy().tobytes()) for part in joined.split(sizes)]


def agreed(operation: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """Run `operation` on every rank and return all results, JSON values in rank order (collective).
    If it raises ValueError or OSError on any rank, all ranks raise the error of the first such
    rank.
    """
    result = failure = None
    try:
        result = operation()
    except (ValueError, OSError) as error:
        failure = described(error)
    results = exchange([result, failure], group)
    for _, failed in results:
        if failed is not None:
            raise_described(failed)
    return [result for result, _ in results]


def described(error: Exception) -> list[str]:
    """Return an error as JSON, for `raise_described` on another rank."""
    return [next(name for name, kind in _TYPES.items() if isinstance(error, kind)), str(error)]


def raise_described(error: list[str]) -> NoReturn:
    """Raise an error of another rank."""
    kind, line = error
    raise _TYPES[kind](line)


def explain_disk_error(error: OSError | MemoryError, root: Path) -> str:
    """Return a one-line message for an error that occurred while writing under `root`."""
    if isinstance(error, MemoryError):
        return "out of memory: add memory to the machine, or lower data.workers"
    attempts = ""
    if isinstance(error, RetriesExhaustedError) and isinstance(error.__cause__, OSError):
        error, attempts = error.__cause__, f" in {ATTEMPTS} attempts"
    reason = (os.strerror(error.errno) if error.errno else str(error)) + attempts
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            fix = "free disk space or lower checkpoint.keep_last"
        case errno.EFBIG:
            fix = "raise the file size limit (ulimit -f)"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            fix = "make the folder writable or choose another run folder"
        case _:
            fix = "check the disk, then start again"
    where = f" ({error.filename})" if error.filename else ""
    folder = next(path for path in (root, *root.absolute().parents) if path.exists())
    usage = shutil.disk_usage(folder)
    free = f"{usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB are free at {folder}"
    return f"{reason}{where}; {free}: {fix}"


def disk_failure(line: str, *, transient: bool) -> OSError:
    """Return the exception that every rank raises for a disk error on any rank. Its type determines
    the exit code, which is then the same on all ranks."""
    return RetriesExhaustedError(line) if transient else OSError(line)
