"""Files that are there whole or not at all: written aside, flushed to disk, then renamed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from data.retry import retried

ASIDE = ".aside"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; removed where the block fails, whatever the reason.

    The block renames it. Raises OSError with the path and a remedy where the disk is full.
    """
    # Two processes may write the same file, such as evaluations of one step.
    aside = path.with_name(f"{path.name}.{os.getpid()}{ASIDE}")
    try:
        with explained(path):
            yield aside
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Add `path` to errors of `write` and `fsync`, which name no file, and the remedy if the disk
    is full. Other errors keep their number.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise OSError(
                f"{path} cannot be written ({error.strerror}): free space and run the same again"
            ) from error
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def commit(path: Path, content: bytes) -> None:
    """Write a file atomically: it exists complete or not at all, even after a power failure.

    Retried after a transient error; raises RetriesExhaustedError if all attempts fail.
    """
    retried(str(path), lambda: _commit(path, content))


def _commit(path: Path, content: bytes) -> None:
    with written_aside(path) as aside:
        with aside.open("wb") as file:
            file.write(content)
            flush(file)
        aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def flush(file: IO[bytes]) -> None:
    """Write what is buffered, down to the disk."""
    file.flush()
    os.fsync(file.fileno())
