"""Atomic writes of files and folders, errors that contain the path, and directory walks that report
errors.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from data.retry import retried

TEMPORARY = ".aside"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# This folder is at the root of a file system, and only root can read it.
_LOST_AND_FOUND = "lost+found"
# AT_FDCWD and RENAME_EXCHANGE of Linux.
_WORKING_FOLDER, _EXCHANGE = -100, 2


@contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`. The block must write it and rename it to `path`.

    The file is deleted if the block fails. Raises OSError with the path and a fix.
    """
    # Two processes, possibly on different machines, may write the same file, for example if both
    # evaluate the same step.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with explained(path):
            yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Add `path` to errors from `write` and `fsync`, and add a fix if the disk is full.

    Other errors keep their errno.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OSError(
                f"{path} cannot be written ({error.strerror}): free up space and run the same "
                "command again"
            ) from error
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def commit(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: even after a power failure, the file either is complete or does not
    exist. `content` may be a function that writes it.

    Retries after a transient error, and raises RetriesExhaustedError if all attempts fail.
    """
    retried(str(path), lambda: _commit(path, content))


def _commit(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    with temporary_path(path) as temporary:
        with temporary.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            flush(file)
        temporary.replace(path)
    sync(path.parent)


@contextmanager
def published_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder. It becomes `path` atomically if there is no error; otherwise it is
    removed. The parents of `path` are created. With `replace`, `path` may be an existing folder.

    The files are synced to disk and readable by all users.
    """
    path = Path(os.path.realpath(path))  # keep a symbolic link, and replace its target
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        yield temporary
        # Make every file readable by all users, because mkdtemp creates folders with mode 0700 and
        # safetensors creates files with mode 0600.
        for entry in [*temporary.rglob("*"), temporary]:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
            sync(entry)
        _publish(temporary, path, replace=replace)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _publish(temporary: Path, path: Path, *, replace: bool) -> None:
    if replace and path.exists():
        if not _exchanged(temporary, path):  # readers find no folder between these two renames
            old = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-old-", dir=path.parent))
            os.rename(path, old / path.name)
            os.rename(temporary, path)
            temporary = old
        shutil.rmtree(temporary)
    else:
        os.rename(temporary, path)
    sync(path.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders atomically. Return False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28, Linux 3.15
    if rename is None:
        return False
    failed: int = rename(
        _WORKING_FOLDER, os.fsencode(one), _WORKING_FOLDER, os.fsencode(other), _EXCHANGE
    )
    return failed == 0


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(file: IO[bytes]) -> None:
    """Write buffered data to the disk and wait for it."""
    file.flush()
    os.fsync(file.fileno())


def is_hidden(folder: str) -> bool:
    """Return whether this is the name of a folder to ignore: a hidden folder or lost+found."""
    return folder.startswith(".") or folder == _LOST_AND_FOUND


def walk_directory(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Like `os.walk`, but raises OSError for a folder that cannot be read.

    Yields (folder, names of subfolders, names of other entries) for `folder` and all folders below
    it, except lost+found. Links are not followed. Subfolders that the caller removes from the list
    are skipped.
    """
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name != _LOST_AND_FOUND]
        yield Path(parent), folders, names


def _raise(error: OSError) -> None:
    raise error
