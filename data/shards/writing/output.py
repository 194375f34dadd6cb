"""The folder to which shards are written: a local folder, or a folder of an object store.

Files appear atomically, and `unfinished.json` claims the folder for one source while it is
unfinished. Local folders are also locked. An object store has no locks: two runs of the same source
may write to it at the same time, which is safe, because both write the same bytes.
"""

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from data.classes.class_list import ClassList
from data.files import TEMPORARY, commit, explained, flush, temporary_path
from data.remote.config import file_url, folder_or_url
from data.remote.fetch import explained as explained_url
from data.remote.fetch import file_system
from data.retry import retried
from data.shards.index import INDEX_SUFFIX, ShardIndex, index_path, parse_index
from data.shards.manifest import (
    CLASSES,
    LABEL_VECTORS,
    MANIFEST,
    ManifestHead,
    ShardInfo,
    SourceInfo,
)
from data.skipped import SKIPPED

WRITABLE = ("s3", "gs")
"""The URL schemes whose objects appear atomically when their upload completes."""

UNFINISHED = "unfinished.json"
"""Describes the source of the shards. It exists while the folder is unfinished."""

_PART_BYTES = 1 << 24  # of an upload; backends send up to 10 parts at the same time
_REQUESTS_AT_ONCE = 64
# Network file systems cache the information that a file does not exist, NFS for up to 60 s.
_VISIBLE_SECONDS = 90
_SHARED = "pass -o on a file system that all nodes share, or an s3:// or gs:// URL"

Answer = TypeVar("Answer")


class OutputFolder:
    """A folder of shards that is being written. `str` returns the path or URL.

    It is pickled for the workers of a Ray cluster, so it contains no open files. Transient failures
    are retried. Raises ValueError for a URL that is not writable.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = folder_or_url(str(folder))
        if isinstance(self.folder, str):
            scheme, _, path = self.folder.partition("://")
            if scheme == "file":
                self.folder = Path(path)
            elif scheme not in WRITABLE:
                known = " or ".join(f"{name}://" for name in WRITABLE)
                raise ValueError(f"{folder} is not writable: pass a local folder, or {known}")

    def __str__(self) -> str:
        return str(self.folder)

    def location(self, file: str) -> Path | str:
        """Return the path or URL of a file."""
        folder = self.folder
        return folder / file if isinstance(folder, Path) else file_url(folder, file)

    def sizes(self) -> dict[str, int]:
        """Map the name of each file to its size in bytes."""
        if isinstance(self.folder, Path):
            local: dict[str, int] = {}
            for path in self.folder.iterdir() if self.folder.is_dir() else ():
                with suppress(FileNotFoundError):  # a temporary file of another process
                    local[path.name] = path.stat().st_size
            return local
        url = self.folder
        try:
            entries = self._call("read", "", lambda files: files.ls(url, detail=True))
        except FileNotFoundError:
            return {}  # an object store does not distinguish an empty folder from a missing one
        prefix = url.partition("://")[2] + "/"
        names = {entry["name"].strip("/"): entry["size"] or 0 for entry in entries}
        return {n.removeprefix(prefix): s for n, s in names.items() if n.startswith(prefix)}

    def read(self, file: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if the file does not exist."""
        where = self.location(file)
        if isinstance(where, Path):
            return where.read_bytes()
        content: bytes = self._call("read", file, lambda files: files.cat_file(where))
        return content

    def write(self, file: str, content: bytes) -> None:
        """Write a small file."""
        where = self.location(file)
        if isinstance(where, Path):
            commit(where, content)
        else:
            self._call("written", file, lambda files: files.pipe_file(where, content))

    @contextmanager
    def staged(self, file: str) -> Iterator[Path]:
        """Yield the path of a new local file for `put`. It is deleted if it is not put."""
        where = self.location(file)
        if isinstance(where, Path):
            with temporary_path(where) as temporary:
                yield temporary
                temporary.unlink(missing_ok=True)
            return
        # The file has no name, so its space is freed even if this process is killed.
        with explained(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as opened:
            yield Path(f"/proc/self/fd/{opened.fileno()}")

    def put(self, staged: Path, file: str) -> None:
        """Write a file whose content is in the local file `staged`, in one upload."""
        where = self.location(file)
        if isinstance(where, Path):
            staged.replace(where)
            return
        self._call(
            "written", file, lambda files: files.put_file(str(staged), where, chunksize=_PART_BYTES)
        )

    def write_classes(self, file: str, classes: ClassList) -> str:
        """Write a class list to a file, and return the SHA-256 of the file."""
        with self.staged(file) as staged:
            sha256 = classes.write(staged)
            self.put(staged, file)
        return sha256

    def delete(self, files: Iterable[str]) -> None:
        """Delete those of `files` that exist."""
        for file in files:
            where = self.location(file)
            with suppress(FileNotFoundError):
                if isinstance(where, Path):
                    where.unlink()
                else:
                    # Unlike `rm`, `rm_file` does not take `*` and `[` in a name for a pattern.
                    self._call("deleted", file, methodcaller("rm_file", where))

    def _call(self, operation: str, file: str, call: Callable[[Any], Answer]) -> Answer:
        """Return `call(file system)` for a URL. Retries after a transient error."""
        url = str(self.location(file)) if file else str(self.folder)

        def attempt() -> Answer:
            with explained_url(url, operation):
                # Other processes write to the folder, so its listing must not be cached.
                return call(file_system(url, use_listings_cache=False))

        return retried(url, attempt)

    # ---------------------------------------------------------------- shards

    def finished(self, files: Iterable[str]) -> dict[str, ShardIndex]:
        """Return the indices of the shards that have been written completely, by file name.

        The index is written last, so its existence implies that the shard was complete.
        """
        sizes = self.sizes()
        complete = [file for file in files if file in sizes and _index_of(file) in sizes]
        found = {}
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            contents = pool.map(self.read, map(_index_of, complete))
            for file, content in zip(complete, contents, strict=True):
                with suppress(ValueError):  # damaged, so the shard is written again
                    index = parse_index(content)
                    if (index.info.file, index.info.bytes) == (file, sizes[file]):
                        found[file] = index
        return found

    def check_shared(self) -> None:
        """Raise FileNotFoundError in a Ray task if its node does not have the folder."""
        if isinstance(self.folder, Path) and not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder} does not exist on the Ray node {socket.gethostname()}: {_SHARED}"
            )

    def check_visible(self, shard: ShardInfo) -> None:
        """Wait until a shard that a Ray task has written is visible on this machine.

        Raises FileNotFoundError if it is not: the task's node has another folder at this path.
        """
        if not isinstance(self.folder, Path):
            return
        end = time.monotonic() + _VISIBLE_SECONDS
        while shard.file not in self.finished([shard.file]):
            if time.monotonic() > end:
                raise FileNotFoundError(
                    f"{self.location(shard.file)} was written by another Ray node but does not "
                    f"exist on {socket.gethostname()}: {_SHARED}"
                )
            time.sleep(0.1)

    # ---------------------------------------------------------------- claim

    @contextmanager
    def claimed(self, about: SourceInfo) -> Iterator[None]:
        """Claim the folder while shards of the source `about` are written to it.

        Raises ValueError, and changes nothing, if the folder contains other files or another
        process writes to it. If the block raises ValueError, the files written so far are deleted:
        the input must be changed, so the run cannot be resumed. A folder that was already finished
        keeps its shards.
        """
        note, content = self.location(UNFINISHED), about.model_dump_json(indent=1).encode()
        self._check_free(about)  # before anything is created
        with ExitStack() as stack:
            if isinstance(note, Path):
                note.parent.mkdir(parents=True, exist_ok=True)
                held = stack.enter_context(note.open("ab", buffering=0))
                is_locked = False
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The other process may have finished and removed this file in the meantime.
                    is_locked = os.path.samestat(os.fstat(held.fileno()), note.stat())
                if not is_locked:
                    raise ValueError(
                        f"{self} is being written by another kway shard process: wait until it ends"
                    )
                # A forked child also has this file open, so closing it would not release the lock.
                stack.callback(fcntl.flock, held, fcntl.LOCK_UN)
                self._check_free(about)  # another process may have written to it in the meantime
                with explained(note), note.open("wb") as file:  # in place, because it is locked
                    file.write(content)
                    flush(file)
            else:
                self.write(UNFINISHED, content)
            try:
                yield
            except ValueError:
                # Another process may have finished the same folder of an object store.
                if MANIFEST not in self.sizes():
                    self.delete(file for file in self.sizes() if _is_written_here(file))
                    if isinstance(note, Path):
                        with suppress(OSError):  # it contains other files
                            note.parent.rmdir()
                raise
            self.delete(file for file in self.sizes() if file.endswith(TEMPORARY))
            self.delete([UNFINISHED])

    def _check_free(self, about: SourceInfo) -> None:
        """Raise ValueError unless the folder is empty or contains shards of `about`."""
        if isinstance(self.folder, Path) and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self} is a file: choose a folder for the shards")
        files = self.sizes()
        try:
            found = SourceInfo.model_validate_json(self.read(UNFINISHED))
        except (FileNotFoundError, ValidationError):  # missing, or truncated by a crash
            found = about
            if MANIFEST in files:
                found = ManifestHead.model_validate_json(self.read(MANIFEST)).source
            elif others := sorted(files.keys() - {UNFINISHED}):
                raise ValueError(
                    f"{self} is not empty (it contains {others[0]}), so {about} cannot be written "
                    "to it: choose an empty folder, or delete this one"
                ) from None
        check_same(self.folder, found, about)


def check_same(folder: Path | str, found: SourceInfo, expected: SourceInfo) -> None:
    """Raise ValueError if `folder` contains shards from a different source."""
    if found != expected:
        raise ValueError(
            f"{folder} contains {found}, not {expected}: choose another folder, or delete this one"
        )


def _index_of(shard: str) -> str:
    return index_path(Path(shard)).name


def _is_written_here(file: str) -> bool:
    """Return whether `kway shard` writes files with this name to an unfinished folder."""
    return file in (CLASSES, LABEL_VECTORS, UNFINISHED, SKIPPED) or file.endswith(
        (".tar", INDEX_SUFFIX, TEMPORARY)
    )
