"""A cache folder of bounded size that all processes on a machine share.

Each file is created once, by the first process that needs it. The least recently used files are
evicted when space is needed. The caller defines the files and the functions that create them. A
file's name identifies its content.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar
from zlib import crc32

from data.files import explained, flush
from data.remote.config import CacheConfig, file_url
from data.remote.fetch import fetch

Fill = Callable[[IO[bytes]], None]
Answer = TypeVar("Answer")

_INCOMING = "incoming"
_EVICTION = "eviction"  # the lock with which a process counts and evicts files
_NUM_LOCKS = 256
_SHARD = ".tar"
_POLL_SECONDS = 0.1


class Cache:
    """The files in `folder`, whose total size is at most `max_bytes`.

    If a file is evicted while a process has it open, that process can still read it, and the disk
    space is freed when it is closed. The cache is safe to use from any number of processes and
    threads, and after fork.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        try:
            self.folder = folder.expanduser()
            self._incoming = self.folder / _INCOMING
            self._locks = self.folder / "locks"
            for each in (self._incoming, self._locks):
                each.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
            reason = getattr(error, "strerror", error)
            raise OSError(
                f"data.cache.folder {folder} cannot be created ({reason}): choose another folder"
            ) from error

    def path(self, name: str) -> Path:
        """Return the path of the file `name`, whether or not it exists."""
        return self.folder / name

    def open(self, name: str, fill: Fill, *, size: int | None) -> int:
        """Return a file descriptor for `name`. If the file does not exist, `fill` writes it first.

        size: the size in bytes, for which space is reserved before the file is written, or None if
        it is unknown. Raises the errors of `fill`, and OSError with a fix if the disk is full.
        """
        if (found := self._existing(name, size)) is not None:
            return found
        with self._locked(_lock_of(name)):
            found = self._existing(name, size)
            return self._make(name, fill, size) if found is None else found

    def fetch(self, name: str, fill: Fill, *, size: int) -> None:
        """Create `name` unless it exists or another process is creating it."""
        with suppress(BlockingIOError), self._locked(_lock_of(name), wait=False):
            found = self._existing(name, size)
            os.close(self._make(name, fill, size) if found is None else found)

    def read(
        self, name: str, fill: Fill, parse: Callable[[Path], Answer], *, size: int | None = None
    ) -> Answer:
        """Return `parse(path of the file)`. A file that `parse` rejects with ValueError, because it
        is damaged, is created once more.

        Raises OSError if the cache is so small that the file is evicted at once.
        """
        for is_last in (False, True):
            os.close(self.open(name, fill, size=size))
            try:
                return parse(self.path(name))
            except (ValueError, FileNotFoundError) as error:
                if is_last and isinstance(error, ValueError):
                    raise
                self.remove(name)
        raise OSError(f"{self.path(name)} was evicted at once: raise data.cache.gigabytes")

    def remove(self, name: str) -> None:
        """Delete a damaged file."""
        self.path(name).unlink(missing_ok=True)

    def _existing(self, name: str, size: int | None) -> int | None:
        """Open a file and mark it as in use, or delete it if it has the wrong size."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY)
        except FileNotFoundError:
            return None
        if size not in (None, os.fstat(descriptor).st_size):
            os.close(descriptor)
            self.remove(name)
            return None
        with suppress(PermissionError):  # only its owner can do this in a shared folder
            os.utime(descriptor)
        return descriptor

    def _make(self, name: str, fill: Fill, size: int | None) -> int:
        """Create the file, whose lock is held, and open it."""
        temporary = self._incoming / name
        try:
            with explained(temporary), temporary.open("w+b") as file:
                if size is not None:
                    self._reserve(file, size)
                fill(file)
                flush(file)
                # Open the file before the rename, because it can be evicted immediately afterwards.
                descriptor = os.open(temporary, os.O_RDONLY)
                temporary.rename(self.path(name))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if size is None:
            with self._locked(_EVICTION):
                self._evict(self.max_bytes)
        return descriptor

    def _reserve(self, file: IO[bytes], size: int) -> None:
        """Reserve space for `size` bytes by extending the file to its full length before its
        content is written.
        """
        if size > self.max_bytes:
            raise ValueError(
                f"{Path(file.name).name} has {size} bytes, but the cache is limited to "
                f"{self.max_bytes}: raise data.cache.gigabytes"
            )
        while True:
            with self._locked(_EVICTION):
                if self._evict(self.max_bytes - size):
                    file.truncate(size)
                    return
            # The remaining files are being written. They can be evicted once they are complete.
            time.sleep(_POLL_SECONDS)

    def _evict(self, max_bytes: int) -> bool:
        """Unlink the least recently used files, shards first, until at most `max_bytes` remain.

        Unfinished files of killed processes are deleted too. Returns False if this is not enough.
        """
        files: list[tuple[bool, float, int, Path]] = []
        total = 0
        for path in [*self._incoming.iterdir(), *self.folder.iterdir()]:
            with suppress(FileNotFoundError, PermissionError):
                if path.parent == self._incoming:
                    with suppress(BlockingIOError), self._locked(_lock_of(path.name), wait=False):
                        path.unlink()
                    total += path.stat().st_size
                elif path.is_file():
                    about = path.stat()
                    total += about.st_size
                    # The indices of splits are small, and processes keep them mapped.
                    files.append((path.suffix != _SHARD, about.st_mtime, about.st_size, path))
        for _, _, size, path in sorted(files):
            if total <= max_bytes:
                break
            with suppress(PermissionError):  # of another user, in a folder that protects it
                path.unlink(missing_ok=True)
                total -= size
        return total <= max_bytes

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Lock `name` for this thread. Raises BlockingIOError if it is locked and `wait` is False.

        The operating system releases the lock of a killed process. Lock files are never deleted.
        """
        # Open the file for reading, because it may belong to another user.
        with open(self._locks / name, "rb", opener=_open_or_create) as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            try:
                yield
            finally:
                # A forked child also has this file open, so closing it would not release the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


def read_mapped(
    folder: Path | str,
    name: str,
    sha256: str,
    config: CacheConfig,
    parse: Callable[[Path], Answer],
) -> Answer:
    """Return `parse(path)` of a file in a folder at a path or, through the cache, at a URL.

    `parse` raises ValueError for a damaged file. Raises the errors of `fetch`.
    """
    if isinstance(folder, Path):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: copy it or run kway shard again")
        return parse(path)
    cache = Cache(config.folder, config.max_bytes)
    url, size = file_url(folder, name), cache.max_bytes
    fill = partial(fetch, url, attempts=config.attempts, max_bytes=size, sha256=sha256)
    return cache.read(f"{sha256}.safetensors", fill, parse)


def _lock_of(name: str) -> str:
    """Return the lock of the file `name`, which it may share with other files."""
    return str(crc32(name.encode()) % _NUM_LOCKS)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)
