"""Claims a folder while shards are written to it, with a lock and a note of its contents."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from data.files import TEMPORARY, explained
from data.shards.index import INDEX_SUFFIX
from data.shards.manifest import LABEL_VECTORS, MANIFEST, Manifest, SourceInfo
from data.skipped import REPAIRED, SKIPPED

# This file describes the source of the shards. It exists while the folder is unfinished.
UNFINISHED = "unfinished.json"


def check_same(folder: Path | str, found: SourceInfo, expected: SourceInfo) -> None:
    """Raise ValueError if `folder` contains shards from a different source."""
    if found != expected:
        raise ValueError(
            f"{folder} contains {found}, not {expected}: choose another folder, or delete this one"
        )


@contextmanager
def claimed(folder: Path, about: SourceInfo) -> Iterator[Callable[[], None]]:
    """Lock `folder` while shards of the source `about` are written to it.

    Yields a function that does nothing: the lock cannot be lost. The folder is created if it is
    missing. Raises ValueError, and changes nothing, if the folder
    contains files other than these shards or is locked by another process. If the block raises
    ValueError, the files written so far are deleted: the input must be changed, so the run cannot
    be resumed. A folder that was already finished keeps its shards.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose a folder for the shards")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / UNFINISHED
    # Create and lock the file before writing to it, so that only one of two concurrent runs claims
    # the folder.
    with note.open("ab+", buffering=0) as held:
        lock(held, note, folder)
        _check_note(held, folder, about, new=new)
        finished_before = (folder / MANIFEST).is_file()
        try:
            yield lambda: None
        except ValueError:
            if not finished_before:
                _discard(folder, remove_folder=new)
            raise
        for path in folder.glob(f"*{TEMPORARY}"):
            path.unlink()
        note.unlink()


def lock(held: IO[bytes], path: Path, folder: Path, *, command: str = "kway shard") -> None:
    """Lock the open file `held` at `path` for a writer of `folder`.

    Raises ValueError if another process holds the lock or has removed the file.
    """
    busy = f"{folder} is being written by another {command} process: wait until it finishes"
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other process may have finished and removed this file since it was opened.
        if not os.path.samestat(os.fstat(held.fileno()), path.stat()):
            raise ValueError(busy)
    except (BlockingIOError, FileNotFoundError) as error:
        raise ValueError(busy) from error


def _check_note(held: IO[bytes], folder: Path, about: SourceInfo, *, new: bool) -> None:
    """Check the note against `about`. If the note is empty or truncated, write `about` to it."""
    held.seek(0)
    content = held.read()
    try:
        check_same(folder, SourceInfo.model_validate_json(content), about)
    except ValidationError:
        try:
            _check_free(folder, about)
            with explained(folder / UNFINISHED):
                held.truncate(0)
                content = about.model_dump_json(indent=1).encode()
                while content:
                    content = content[held.write(content) :]
                os.fsync(held.fileno())
        except (ValueError, OSError):
            (folder / UNFINISHED).unlink()
            if new:
                with suppress(OSError):
                    folder.rmdir()
            raise


def _check_free(folder: Path, about: SourceInfo) -> None:
    """Raise ValueError unless the folder is empty or contains finished shards of `about`."""
    if (folder / MANIFEST).is_file():
        check_same(folder, Manifest.read(folder).source, about)
        return
    if others := sorted(path.name for path in folder.iterdir() if path.name != UNFINISHED):
        raise ValueError(
            f"{folder} is not empty (it contains {others[0]}), so {about} cannot be written to it: "
            "choose an empty folder, or delete this one"
        )


def _discard(folder: Path, *, remove_folder: bool) -> None:
    if remove_folder:
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if written_here(path.name) or path.name.endswith(TEMPORARY):
            path.unlink()


def written_here(file: str) -> bool:
    """Return whether `kway shard` writes files with this name to an unfinished folder."""
    return file in (LABEL_VECTORS, UNFINISHED) or file.endswith(
        (".tar", INDEX_SUFFIX, SKIPPED, REPAIRED)
    )
