"""A bounded folder of files that all processes of a machine share: each is made once, by whoever
comes first, and the least recently used ones go when room is needed.

What the files are, and how one is made, is the caller's; their names tell their content.
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
# Small files, needed whole at each start, go later than the shards of their time.
_SMALL = ".safetensors"
_SMALL_STAYS_SECONDS = 600


class Cache:
    """Files of `folder`, together never more than `max_bytes` but for small ones on their way.

    A file that is evicted while a process holds it open stays readable there, and its bytes on the
    disk until it is closed. Safe for any number of processes and threads, and after fork.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder.expanduser()
        self.max_bytes = max_bytes
        self._incoming = self.folder / _INCOMING
        try:
            self._incoming.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"data.cache.folder is {self.folder} and cannot be made ({error.strerror}): name "
                "another one"
            ) from error

    def path(self, name: str) -> Path:
        """Where the file `name` stands, if it is there."""
        return self.folder / name

    def has(self, name: str) -> bool:
        """Whether `name` is there; notes that it is in use."""
        _touch(self.path(name))
        return self.path(name).exists()

    def size(self, name: str) -> int:
        """Bytes of the file `name`; 0 where it is not there."""
        return _size(self.path(name))

    def open(self, name: str, fill: Fill, *, size: int | None = None) -> int:
        """Descriptor of the file `name`; `fill` writes it first where it is not there.

        size: bytes that it must have, for which room is made before it comes; None: a small file.
        Raises what `fill` raises, and OSError with a remedy where the disk is full.
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
        """Have `name` there, or leave it to the process that is just making it.

        It waits while many files are on their way: so many processes do not flood a server.
        """
        while not self.has(name) and self._num_incoming() >= _AHEAD_AT_ONCE:
            time.sleep(_POLL_SECONDS)
        if not self.has(name) and (made := self._make(name, fill, size, wait=False)) is not None:
            os.close(made)

    def remove(self, name: str) -> None:
        """Drop a file that turned out to be damaged."""
        self.path(name).unlink(missing_ok=True)

    def trim(self) -> None:
        """Evict what is too much after small files came, for which no room was made."""
        with self._alone():
            self._evict(self.max_bytes)

    def _make(self, name: str, fill: Fill, size: int | None, *, wait: bool) -> int | None:
        """Make the file and open it; None where another process has made it, or is at it.

        The file is locked while it comes in, and renamed with its lock: who waited for it finds
        that it has gone to its place, and the lock of a killed process goes with the process.
        """
        temporary = self._incoming / name
        with explained(temporary), ExitStack() as stack:
            # Alone, or it would be taken for one that was left, before it has its lock.
            with self._alone():
                file = stack.enter_context(open(temporary, "r+b", opener=_open_or_create))
                _lock(file, wait=False)
            if not _lock(file, wait=wait):
                return None
            try:
                return self._filled(file, self.path(name), fill, size)
            finally:
                # A process forked meanwhile holds this file, too: closing would keep the lock.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _filled(self, file: IO[bytes], path: Path, fill: Fill, size: int | None) -> int | None:
        """The locked file, written and renamed to `path`; None where that has been done."""
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
            # Opened before it can be evicted again.
            descriptor = os.open(temporary, os.O_RDONLY)
            temporary.rename(path)
            return descriptor
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _reserve(self, file: IO[bytes], size: int) -> None:
        """Make room for `size` bytes and take it: the file has its length before its content."""
        if size > self.max_bytes:
            raise ValueError(
                f"{Path(file.name).name} has {size} bytes and the cache holds {self.max_bytes}: "
                "raise data.cache.gigabytes"
            )
        while True:
            with self._alone():
                file.truncate(0)
                if self._evict(self.max_bytes - size):
                    file.truncate(size)
                    return
            # Nothing but files on their way is left: they end, and can go then.
            time.sleep(_POLL_SECONDS)

    def _num_incoming(self) -> int:
        """Files that come in, less those that a killed process left: these are removed."""
        if len(os.listdir(self._incoming)) < _AHEAD_AT_ONCE:
            return 0  # few, whatever they are
        with self._alone():
            self._drop_left()
        return len(os.listdir(self._incoming))

    def _drop_left(self) -> None:
        for left in self._incoming.iterdir():
            _remove_unless_locked(left)

    def _evict(self, max_bytes: int) -> bool:
        """Unlink the least recently used files until `max_bytes` stay; False where more do.

        What a killed process left unfinished goes with them.
        """
        self._drop_left()
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
    def _alone(self) -> Iterator[None]:
        """One process of the machine at a time counts and evicts."""
        # To read: it may belong to another user.
        with open(self.folder / _LOCK, "rb", opener=_open_or_create) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _touch(file: Path | int) -> None:
    """Note that it is in use, where it is there. Of another user, who shares the folder, it fails:
    then only its owner's processes say so."""
    with suppress(FileNotFoundError, PermissionError):
        os.utime(file)


def _lock(file: IO[bytes], *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the open file still stands at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _unlink(path: Path) -> bool:
    """False where it belongs to another user, and the folder keeps it for them."""
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
