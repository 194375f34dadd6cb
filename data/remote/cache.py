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

Fill = Callable[[IO[bytes]], None]

_INCOMING = "incoming"
_LOCK = "lock"
_POLL_SECONDS = 0.1
_AHEAD_AT_ONCE = 16
# Small files (indices, label vectors) are read in full at every start, so they are evicted later
# than shards of the same age.
_SMALL = ".safetensors"
_SMALL_STAYS_SECONDS = 600


class Cache:
    """The files in `folder`, whose total size is at most `max_bytes`, not counting small files that
    are being fetched.

    If a file is evicted while a process has it open, that process can still read it, and the disk
    space is freed when it is closed. The cache is safe to use from any number of processes and
    threads, and after fork.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder.expanduser()
        self.max_bytes = max_bytes
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

    def has(self, name: str) -> bool:
        """Return whether `name` exists. If it does, mark it as in use."""
        _touch(self.path(name))
        return self.path(name).exists()

    def size(self, name: str) -> int:
        """Return the size of the file `name` in bytes, or 0 if it does not exist."""
        return _size(self.path(name))

    def open(self, name: str, fill: Fill, *, size: int | None = None) -> int:
        """Return a file descriptor for `name`. If the file does not exist, `fill` writes it first.

        size: the expected size in bytes, for which space is reserved before the file is written, or
        None for a small file. Raises the errors of `fill`, and OSError with a fix if the disk is
        full.
        """
        while True:
            try:
                descriptor = os.open(self.path(name), os.O_RDONLY)
            except FileNotFoundError:
                made = self._make(name, fill, size, wait=True)
                if made is None:
                    continue
                return made
            if size in (None, os.fstat(descriptor).st_size):
                _touch(descriptor)
                return descriptor
            os.close(descriptor)
            self.remove(name)

    def fetch(self, name: str, fill: Fill, *, size: int | None = None) -> None:
        """Create `name` unless it exists or another process is creating it.

        Waits while many files are being created, so that many processes do not overload a server.
        """
        while not self.has(name) and self._num_incoming() >= _AHEAD_AT_ONCE:
            time.sleep(_POLL_SECONDS)
        if not self.has(name) and (made := self._make(name, fill, size, wait=False)) is not None:
            os.close(made)

    def remove(self, name: str) -> None:
        """Delete a damaged file."""
        self.path(name).unlink(missing_ok=True)

    def trim(self) -> None:
        """Evict files until the size limit is met again. Call this after adding small files, for
        which no space is reserved.
        """
        with self._locked():
            self._evict(self.max_bytes)

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

    def _num_incoming(self) -> int:
        """Count the files being written, and delete those that killed processes left behind."""
        if len(os.listdir(self._incoming)) < _AHEAD_AT_ONCE:
            return 0  # there are few, even if some are abandoned
        with self._locked():
            self._remove_abandoned()
        return len(os.listdir(self._incoming))

    def _remove_abandoned(self) -> None:
        for path in self._incoming.iterdir():
            _remove_unless_locked(path)

    def _evict(self, max_bytes: int) -> bool:
        """Unlink the least recently used files until at most `max_bytes` remain.

        Unfinished files of killed processes are deleted too. Returns False if the remaining files
        cannot be deleted.
        """
        self._remove_abandoned()
        total = sum(_size(path) for path in self._incoming.iterdir())
        files = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.is_file() and entry.name != _LOCK:
                    about = entry.stat()
                    longer = _SMALL_STAYS_SECONDS if entry.name.endswith(_SMALL) else 0
                    files.append((about.st_mtime + longer, about.st_size, entry.path))
        total += sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= max_bytes:
                break
            if _unlink(Path(path)):
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


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _touch(file: Path | int) -> None:
    """Mark a file as in use by updating its modification time, if the file exists.

    In a shared folder, this has no effect on files of other users; only the owner's processes can
    update them.
    """
    with suppress(FileNotFoundError, PermissionError):
        os.utime(file)


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


def _unlink(path: Path) -> bool:
    """Unlink a file. Returns False if it belongs to another user and the folder protects it."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def _remove_unless_locked(path: Path) -> None:
    with suppress(FileNotFoundError), path.open("rb") as file:
        if _lock(file, wait=False):
            if _is_at(file, path):
                _unlink(path)
            fcntl.flock(file, fcntl.LOCK_UN)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
