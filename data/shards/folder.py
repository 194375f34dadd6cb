"""The interface to a folder of shards, local or at a URL.

`data/remote/folder.py` implements it for URLs.
"""

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from data.loading.order import Order
from data.messages import kway_command
from data.retry import wait_before_retry
from data.shards.index import ShardIndex, open_index
from data.shards.manifest import ShardInfo

Answer = TypeVar("Answer")

_MAX_OPEN_FILES = 256


class ShardFolder(ABC):
    """A folder of shards and their indices. `str` returns the path or URL."""

    verified: bool = False
    """Whether files from `open` have been checked against the SHA-256 in the manifest."""
    bytes_at_once: int | None = None
    """The maximum total size, in bytes, of the shards that are stored at the same time, or None for
    no limit.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the path or URL, for titles."""

    @abstractmethod
    def address(self, shard: ShardInfo) -> str:
        """Return the path or URL of a shard, for messages."""

    @abstractmethod
    def remedy(self, shard: ShardInfo) -> str:
        """Return the fix that messages suggest for a shard whose checksum does not match."""

    @abstractmethod
    def indices(self, shards: Sequence[ShardInfo]) -> list[ShardIndex]:
        """Return the indices of `shards`.

        Raises ValueError if an index is damaged or does not match its shard.
        """

    @abstractmethod
    def open(self, shard: ShardInfo) -> int:
        """Return a new file descriptor of a shard, for `pread`."""

    def evicted(self, descriptor: int) -> bool:
        """Return whether the open file was evicted, so that closing it frees its disk space."""
        return False

    def prefetch(self, shard: ShardInfo) -> None:
        """Fetch a shard that will be read soon and mark it as in use."""
        return

    def keep_indices(self, shards: Sequence[ShardInfo]) -> None:
        """Mark the indices of `shards` as in use."""
        return

    def check_order(self, order: Order, shards: Sequence[ShardInfo], groups_at_once: int) -> None:
        """Raise ValueError if the shards of `groups_at_once` groups do not fit in the cache."""
        return


@dataclass(frozen=True)
class LocalFolder(ShardFolder):
    """A folder on this machine. Files are read in place."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def address(self, shard: ShardInfo) -> str:
        return str(self.path / shard.file)

    def remedy(self, shard: ShardInfo) -> str:
        return f"run {kway_command('shard', 'verify', self.path)}"

    def indices(self, shards: Sequence[ShardInfo]) -> list[ShardIndex]:
        return [self._index(shard) for shard in shards]

    def _index(self, shard: ShardInfo) -> ShardIndex:
        path = self.path / shard.file
        index = open_index(path)
        if index.info != shard:
            raise ValueError(
                f"the index of {path} does not match the manifest: delete the folder and run kway "
                "shard again"
            )
        return replace(index, info=shard)  # equal objects share memory

    def open(self, shard: ShardInfo) -> int:
        return os.open(self.path / shard.file, os.O_RDONLY)


class OpenShards:
    """The open files of `shards` in `folder`, by shard number.

    A file is opened when it is first read.
    """

    def __init__(self, folder: ShardFolder, shards: Sequence[ShardInfo]) -> None:
        self._folder = folder
        self._shards = shards
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, read: Callable[..., Answer], *where: Any) -> Answer:
        """Return `read(descriptor, *where)` for a shard. Retries after a transient error."""
        attempt = 1
        while True:
            try:
                return read(self._file(shard), *where)
            except OSError as error:
                self._close_file(shard)  # a stale descriptor does not recover
                address = self._folder.address(self._shards[shard])
                wait_before_retry(address, error, attempt)
            attempt += 1

    def pread(self, shard: int, size: int, offset: int) -> bytes:
        """Like `read` with `os.pread`, but faster in the usual case, for small samples."""
        try:
            descriptor = self._files[shard]
            self._files.move_to_end(shard)
            return os.pread(descriptor, size, offset)
        except (KeyError, OSError):
            return self.read(shard, os.pread, size, offset)

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _close_file(self, shard: int) -> None:
        if (descriptor := self._files.pop(shard, None)) is not None:
            os.close(descriptor)

    def _file(self, shard: int) -> int:
        """Return the descriptor of a shard.

        If too many descriptors are open, the least recently used one is closed.
        """
        if (descriptor := self._files.get(shard)) is not None:
            self._files.move_to_end(shard)
            return descriptor
        self._files[shard] = self._folder.open(self._shards[shard])
        while len(self._files) > 1 and (
            len(self._files) > _MAX_OPEN_FILES
            # An evicted shard occupies disk space until its descriptor is closed.
            or self._folder.evicted(next(iter(self._files.values())))
        ):
            os.close(self._files.popitem(last=False)[1])
        return self._files[shard]
