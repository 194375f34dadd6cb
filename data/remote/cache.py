"""A cache folder of bounded size that all processes on a machine share.

Each file is created once, by the first process that needs it. The least recently used files are
evicted when space is needed. The caller defines the files and the functions that create them. A
file's name identifies its content.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from data.files import explained, flush
from data.remote.config import CacheConfig
from data.remote.fetch import fetch

Fill = Callable[[IO[bytes]], None]

_INCOMING = "incoming"
_LOCK = "lock"
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
        except RuntimeError as error:
            raise OSError(
                f"data.cache.folder {folder} is in a home folder, but this user has none: choose "
                "another folder"
            ) from error
        self._incoming = self.folder / _INCOMING
        try:
            self._incoming.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"data.cache.folder {self.folder} cannot be created ({error.strerror}): choose "
                "another folder"
            ) from error

    def path(self, name: str) -> Path:
        """Return the path of the file `name`, whether or not it exists."""
        return self.folder / name

    def open(self, name: str, fill: Fill, *, size: int | None) -> int:
        """Return a file descriptor for `name`. If the file does not exist, `fill` writes it first.

        size: the size in bytes, for which space is reserved before the file is written, or None if
        it is unknown. Raises the errors of `fill`, and OSError with a fix if the disk is full.
        """
        while True:
            with suppress(FileNotFoundError):
                descriptor = os.open(self.path(name), os.O_RDONLY)
                if size in (None, os.fstat(descriptor).st_size):
                    # Mark the file as in use. Only its owner can do this in a shared folder.
                    with suppress(PermissionError):
                        os.utime(descriptor)
                    return descriptor
                os.close(descriptor)
                self.remove(name)
            if (made := self._make(name, fill, size, wait=True)) is not None:
                return made

    def fetch(self, name: str, fill: Fill, *, size: int) -> None:
        """Create `name` unless it exists or another process is creating it."""
        with suppress(FileNotFoundError, PermissionError):
            os.utime(self.path(name))
        if self.path(name).exists():
            return
        if (made := self._make(name, fill, size, wait=False)) is not None:
            os.close(made)

    def remove(self, name: str) -> None:
        """Delete a damaged file."""
        self.path(name).unlink(missing_ok=True)

    def _make(self, name: str, fill: Fill, size: int | None, *, wait: bool) -> int | None:
        """Create the file and open it.

        Returns None if another process has created the file or is creating it. The temporary file
        is locked while it is written and renamed. A process that waited for the lock detects the
        rename. The operating system releases the lock of a killed process.
        """
        temporary = self._incoming / name
        with explained(temporary), ExitStack() as stack:
            # Hold the folder lock. Otherwise, before the new file is locked, another process could
            # take it for an abandoned file and delete it.
            with self._locked():
                file = stack.enter_context(open(temporary, "r+b", opener=_open_or_create))
                _lock(file, wait=False)
            if not _lock(file, wait=wait):
                return None
            try:
                return self._filled(file, self.path(name), fill, size)
            finally:
                # A forked child also has this file open, so closing it would not release the lock.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _filled(self, file: IO[bytes], path: Path, fill: Fill, size: int | None) -> int | None:
        """Fill the locked file and rename it to `path`.

        Returns None if another process has already done so.
        """
        temporary = self._incoming / path.name
        if not _is_at(file, temporary):
            return None
        try:
            if path.exists():
                temporary.unlink()
                return None
            if size is not None:
                self._reserve(file, size)
            fill(file)
            flush(file)
            # Open the file before the rename, because it can be evicted immediately afterwards.
            descriptor = os.open(temporary, os.O_RDONLY)
            temporary.rename(path)
            if size is None:
                with self._locked():
                    self._evict(self.max_bytes)
            return descriptor
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

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
            with self._locked():
                file.truncate(0)
                if self._evict(self.max_bytes - size):
                    file.truncate(size)
                    return
            # The remaining files are being written. They can be evicted once they are complete.
            time.sleep(_POLL_SECONDS)

    def _evict(self, max_bytes: int) -> bool:
        """Unlink the least recently used files, shards first, until at most `max_bytes` remain.

        Unfinished files of killed processes are deleted too. Returns False if the remaining files
        cannot be deleted.
        """
        files: list[tuple[bool, float, int, Path]] = []
        total = 0
        for path in [*self._incoming.iterdir(), *self.folder.iterdir()]:
            with suppress(FileNotFoundError, PermissionError):
                if path.parent == self._incoming:
                    _remove_unless_locked(path)
                    total += path.stat().st_size
                elif path.is_file() and path.name != _LOCK:
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
    def _locked(self) -> Iterator[None]:
        """Lock the folder, so that only one process on the machine counts and evicts files."""
        # Open the file for reading, because it may belong to another user.
        with open(self.folder / _LOCK, "rb", opener=_open_or_create) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def cached_copy(url: str, sha256: str, config: CacheConfig, *, again: bool = False) -> Path:
    """Return the path of the copy of a file, which is named by its SHA-256.

    again: whether to replace a copy, because it is damaged. Raises the errors of `fetch`.
    """
    cache = Cache(config.folder, config.max_bytes)
    name = f"{sha256}.safetensors"
    if again:
        cache.remove(name)

    def fill(file: IO[bytes]) -> None:
        fetch(url, file, attempts=config.attempts, max_bytes=cache.max_bytes, sha256=sha256)

    os.close(cache.open(name, fill, size=None))
    return cache.path(name)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _remove_unless_locked(path: Path) -> None:
    with path.open("rb") as file:
        if _lock(file, wait=False):
            if _is_at(file, path):
                path.unlink()
            fcntl.flock(file, fcntl.LOCK_UN)
