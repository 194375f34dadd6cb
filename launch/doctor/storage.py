"""The folder of runs: free space, and the file system operations that checkpoints need."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from launch.doctor.check import Finding, Workload, error, in_gib, ok, warning

_LOW_SPACE, _NO_SPACE = 20 << 30, 1 << 30
_TRIAL_BYTES = 8 << 20
_FORGOTTEN = {"tmpfs": "is memory: gone on reboot", "overlay": "goes with its container"}


def disk_space(workload: Workload) -> Iterator[Finding]:
    """A checkpoint stores the weights twice with SGD and three times with AdamW, and several
    checkpoints are kept."""
    folder = existing(workload.run)
    free = shutil.disk_usage(folder).free
    line = f"{in_gib(free)} free at {folder}"
    remedy = "free some, lower checkpoint.keep_last, or put `run` elsewhere"
    if free < _LOW_SPACE:
        make = error if free < _NO_SPACE else warning
        yield make("disk space", f"{line}; kway plan says what a checkpoint takes", remedy)
    else:
        yield ok("disk space", line)
    inodes = os.statvfs(folder)
    if inodes.f_files and inodes.f_favail < 1000:
        yield error("disk space", f"{inodes.f_favail} inodes left at {folder}", remedy)


def file_system(workload: Workload) -> Iterator[Finding]:
    """What committing a checkpoint needs: fsync, replacing a file, renaming a folder, and flock."""
    folder = existing(workload.run)
    kind = kind_of(folder)
    try:
        with TemporaryDirectory(prefix=".kway-doctor-", dir=folder) as trial:
            speed = _try_commit(Path(trial))
    except OSError as failure:
        yield error("run folder", f"{folder} ({kind}): {_what_failed(failure)}", _remedy(failure))
        return
    line = f"{folder} ({kind}): writes {speed / 2**20:,.0f} MiB/s to disk; renames, locks"
    if kind in _FORGOTTEN:
        remedy = "put `run` on a disk, or a volume, that outlives this"
        yield warning("run folder", f"{line}; {kind} {_FORGOTTEN[kind]}", remedy)
    else:
        yield ok("run folder", line)


def _try_commit(folder: Path) -> float:
    """Do what committing a checkpoint does. Returns the rate of writes to disk in bytes/s."""
    started = time.perf_counter()
    for _ in range(2):  # the second file replaces the first
        with (aside := folder / "probe.partial").open("wb") as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        aside.replace(folder / "probe")
    seconds = time.perf_counter() - started
    (folder / "aside").mkdir()
    (folder / "aside").rename(folder / "step-00000000")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return 2 * _TRIAL_BYTES / seconds


def _what_failed(failure: OSError) -> str:
    what = failure.strerror or str(failure)
    return f"it cannot do what a checkpoint needs: {what}"


def _remedy(failure: OSError) -> str:
    match failure.errno:
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "let this user write there, or choose another `run`"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free space, or raise the limit (quota, ulimit -f)"
        case errno.ENOLCK | errno.EOPNOTSUPP | errno.ENOSYS | errno.EINVAL:
            return "choose a `run` on a file system with locks and rename (NFS: start lockd)"
    return "choose another `run`"


def existing(path: Path) -> Path:
    """The folder itself, or its nearest existing ancestor."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def kind_of(folder: Path) -> str:
    """The type of the file system that contains the folder: `ext4`, `nfs4`, `fuse.s3fs`."""
    folder = folder.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if folder.is_relative_to(mount.mountpoint)
    ]
    # The longest mount point wins. The sort is stable, because a later mount hides an earlier one
    # at the same path.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return mounts[-1].fstype if mounts else "unknown"
