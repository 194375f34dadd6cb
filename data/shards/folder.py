"""A folder that shards are read from: a local one, or one behind a URL.

What a split needs of it, whatever it is; the one behind a URL is `data/remote/folder.py`.
"""

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from data.loading.order import Order
from data.retry import wait_before_retry
from data.shards.index import ShardIndex, open_index
from data.shards.manifest import ShardInfo

Answer = TypeVar("Answer")

_MAX_OPEN_FILES = 256


class ShardFolder(ABC):
    """Shards and their indices; `str` of it is its path or URL."""

    verified: bool = False
    """Whether what `open` gives has the SHA-256 of the manifest."""
    bytes_at_once: int | None = None
    """Bytes of shards that can be held; None: all of them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its last part, for titles."""

    @abstractmethod
    def address(self, shard: ShardInfo) -> str:
        """The path or URL of a shard, for messages."""

    @abstractmethod
    def remedy(self, shard: ShardInfo) -> str:
        """What to do where the bytes of a sample are not those that were written."""

    @abstractmethod
    def indices(self, shards: Sequence[ShardInfo]) -> list[ShardIndex]:
        """The indices of `shards`; ValueError where one is damaged or of other shards."""

    @abstractmethod
    def open(self, shard: ShardInfo) -> int:
        """A new descriptor of a shard, to `pread` from."""

    def evicted(self, descriptor: int) -> bool:
        """Whether the file of a descriptor is deleted, and only the descriptor keeps its bytes."""
        return False

    def prefetch(self, shard: ShardInfo) -> None:
        """Fetch a shard that will be read soon, and mark it as in use."""
        return

    def keep_indices(self, shards: Sequence[ShardInfo]) -> None:
        """Mark the indices of `shards` as in use."""
        return

    def check_order(self, order: Order, shards: Sequence[ShardInfo], groups_at_once: int) -> None:
        """Raise ValueError where so many groups of an order are more shards than can be held."""
        return


@dataclass(frozen=True)
class LocalFolder(ShardFolder):
    """A folder of this machine: every file is there, nothing is copied."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def address(self, shard: ShardInfo) -> str:
        return str(self.path / shard.file)

    def remedy(self, shard: ShardInfo) -> str:
        return f"see kway shard verify {self.path}"

    def indices(self, shards: Sequence[ShardInfo]) -> list[ShardIndex]:
        return [self._index(shard) for shard in shards]

    def _index(self, shard: ShardInfo) -> ShardIndex:
        path = self.path / shard.file
        index = open_index(path)
        if index.info != shard:
            raise ValueError(
                f"the index of {path} belongs to other shards than the manifest: "
                "delete the folder and run kway shard again"
            )
        return replace(index, info=shard)  # of two equal ones, one is kept

    def open(self, shard: ShardInfo) -> int:
        return os.open(self.path / shard.file, os.O_RDONLY)


class OpenShards:
    """The open files of `shards` in `folder`, by their number; opened when they are first read."""

    def __init__(self, folder: ShardFolder, shards: Sequence[ShardInfo]) -> None:
        self._folder = folder
        self._shards = shards
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, read: Callable[..., Answer], *where: Any) -> Answer:
        """Call `read(descriptor, *where)` on a shard; retry after a transient error."""
        attempt = 1
        while True:
            try:
                return read(self._file(shard), *where)
            except OSError as error:
                self._close_file(shard)  # a stale descriptor stays stale
                address = self._folder.address(self._shards[shard])
                wait_before_retry(address, error, attempt)
            attempt += 1

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _close_file(self, shard: int) -> None:
        if (descriptor := self._files.pop(shard, None)) is not None:
            os.close(descriptor)

    def _file(self, shard: int) -> int:
        """Descriptor of a shard; the least recently used one is closed when many are open."""
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        self._files[shard] = self._folder.open(self._shards[shard])
        while len(self._files) > 1 and (
            len(self._files) > _MAX_OPEN_FILES
            # An evicted shard stays on the disk until it is closed.
            or self._folder.evicted(next(iter(self._files.values())))
        ):
            os.close(self._files.popitem(last=False)[1])
        return self._files[shard]
