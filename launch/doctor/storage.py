"""Checks of the recipe's inputs and of the run folder: free space, and the file system operations
that checkpoints need.
"""

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
_TEMPORARY = {"tmpfs": "is cleared on reboot", "overlay": "is deleted with its container"}


def inputs(workload: Workload) -> Iterator[Finding]:
    """Check that the recipe's local shards and tokenizer exist."""
    from data.shards.manifest import MANIFEST, Manifest

    for needed in workload.inputs:
        if not needed.path.exists():
            yield error("inputs", f"{needed.path} does not exist", f"run {needed.command}")
            continue
        try:
            if needed.path.name == MANIFEST:
                Manifest.load(needed.path.parent)
            yield ok("inputs", f"{needed.path} exists")
        except (ValueError, OSError) as failure:
            yield error("inputs", str(failure), f"run {needed.command}")


def disk_space(workload: Workload) -> Iterator[Finding]:
    """Check the free disk space.

    A checkpoint is twice as large as the weights with SGD and three times as large with AdamW, and
    a run keeps several checkpoints.
    """
    folder = existing(workload.run)
    free = shutil.disk_usage(folder).free
    line = f"{in_gib(free)} free in {folder}"
    remedy = "free disk space, lower checkpoint.keep_last, or choose another `run` folder"
    if free < _LOW_SPACE:
        make = error if free < _NO_SPACE else warning
        yield make("disk space", f"{line}; kway plan estimates the size of a checkpoint", remedy)
    else:
        yield ok("disk space", line)
    inodes = os.statvfs(folder)
    if inodes.f_files and inodes.f_favail < 1000:
        yield error("disk space", f"{inodes.f_favail} inodes free in {folder}", remedy)


def file_system(workload: Workload) -> Iterator[Finding]:
    """Check the operations that a checkpoint commit needs, such as fsync, flock and rename."""
    folder = existing(workload.run)
    kind = kind_of(folder)
    try:
        with TemporaryDirectory(prefix=".kway-doctor-", dir=folder) as trial:
            speed = _try_commit(Path(trial))
    except OSError as failure:
        yield error("run folder", f"{folder} ({kind}): {_what_failed(failure)}", _remedy(failure))
        return
    line = f"{folder} ({kind}): writes {speed / 2**20:,.0f} MiB/s to disk; rename and flock work"
    if kind in _TEMPORARY:
        remedy = "put the `run` folder on a disk or a persistent volume"
        yield warning("run folder", f"{line}; {kind} {_TEMPORARY[kind]}", remedy)
    else:
        yield ok("run folder", line)


def _try_commit(folder: Path) -> float:
    """Run the operations of a checkpoint commit and return the write rate in bytes/s."""
    started = time.perf_counter()
    for _ in range(2):  # the second file replaces the first
        with (partial := folder / "probe.partial").open("wb") as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.replace(folder / "probe")
    seconds = time.perf_counter() - started
    (folder / "step.partial").mkdir()
    (folder / "step.partial").rename(folder / "step-00000000")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return 2 * _TRIAL_BYTES / seconds


def _what_failed(failure: OSError) -> str:
    what = failure.strerror or str(failure)
    return f"checkpoints cannot be written, because a file operation failed: {what}"


def _remedy(failure: OSError) -> str:
    match failure.errno:
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "grant this user write access, or choose another `run` folder"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "free disk space, or raise the limit (quota, ulimit -f)"
        case errno.ENOLCK | errno.EOPNOTSUPP | errno.ENOSYS | errno.EINVAL:
            return (
                "use a `run` folder whose file system supports flock and rename (NFS: start lockd)"
            )
    return "choose another `run` folder"


def existing(path: Path) -> Path:
    """Return the folder itself, or its nearest existing ancestor."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def kind_of(folder: Path) -> str:
    """Return the type of the folder's file system: `ext4`, `nfs4`, `fuse.s3fs`."""
    folder = folder.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if folder.is_relative_to(mount.mountpoint)
    ]
    # The longest mount point takes precedence. The sort must be stable, because a later mount hides
    # an earlier one at the same path.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return mounts[-1].fstype if mounts else "unknown"
