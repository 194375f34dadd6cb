"""What a failed write of a checkpoint says to a person: the reason, the free space, the remedy."""

import errno
import os
import shutil
from pathlib import Path


def explain(error: OSError | MemoryError, root: Path) -> str:
    """One line for an error that came up while writing under `root`."""
    if isinstance(error, MemoryError):
        return "out of memory: give the machine more, or lower data.workers"
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            remedy = "make room there or lower checkpoint.keep_last"
        case errno.EFBIG:
            remedy = "raise the limit on a file's size (ulimit -f)"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            remedy = "make the folder writable or choose another run folder"
        case _:
            remedy = "check the disk, then start again"
    where = f" ({error.filename})" if error.filename else ""
    return f"{reason}{where}; {_free(root)}: {remedy}"


def _free(root: Path) -> str:
    place = next(path for path in (root, *root.absolute().parents) if path.exists())
    usage = shutil.disk_usage(place)
    return f"{usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB are free at {place}"
