"""The shards of a split, in a local folder or at a URL, and their open files.

Shards at a URL are fetched once per machine into a cache (`data/remote/cache.py`), where a shard is
named by its SHA-256. Different datasets or versions therefore never mix, and identical shards are
stored once. While one group of an order is read, threads fetch the next one.
"""

import logging
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread, main_thread
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from data.loading.order import Order
from data.messages import kway_command
from data.remote.cache import Cache
from data.remote.config import CacheConfig, address
from data.remote.fetch import fetch
from data.retry import wait_before_retry
from data.shards.manifest import ShardInfo

_log = logging.getLogger("kway.data")

Answer = TypeVar("Answer")

_PREFETCH_THREADS = 4
_TOUCH_SECONDS = 60.0


class Shard(NamedTuple):
    """A shard in the folder at a path or URL."""

    folder: Path | str
    info: ShardInfo

    @property
    def is_remote(self) -> bool:
        return isinstance(self.folder, str)

    @property
    def address(self) -> str:
        """The path or URL of the shard."""
        return address(self.folder, self.info.file)

    @property
    def cached_name(self) -> str:
        return f"{self.info.sha256}.tar"


class ShardFiles:
    """The files of `shards`, which may be in several folders.

    index_size: the size in bytes of the index of the split, which the cache stores too. Raises
    ValueError if a shard at a URL does not fit in the cache.
    """

    def __init__(self, shards: Sequence[Shard], config: CacheConfig, *, index_size: int) -> None:
        self._shards = shards
        self._ends = np.cumsum([shard.info.samples for shard in shards])
        self._config = config
        # Descriptors by number of shard. Loops over many samples read from them directly.
        self.opened: dict[int, int] = {}
        # Leave the other half to the rest of the process.
        self._max_files = max(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._queue: deque[int] = deque()
        self._read_group: tuple[Order | None, int] | None = None
        self._read_at = 0.0
        self._cache: Cache | None = None
        self._capacity = config.max_bytes - index_size
        if remote := [shard for shard in shards if shard.is_remote]:
            self._cache = Cache(config.folder, config.max_bytes)
            self._urls = ", ".join(dict.fromkeys(str(shard.folder) for shard in remote))
            if (largest := max(shard.info.bytes for shard in remote)) > self._capacity:
                raise ValueError(
                    f"{self._urls} has a shard of {_gigabytes(largest)} and an index of "
                    f"{_gigabytes(index_size)}, but data.cache.gigabytes is {config.gigabytes:g}: "
                    f"raise it to {_rounded_up(largest + index_size)} or more"
                )

    @property
    def is_remote(self) -> bool:
        """Whether any of the shards is at a URL."""
        return self._cache is not None

    def remedy(self, number: int) -> str:
        """Return the fix that messages suggest for a shard whose checksum does not match."""
        shard = self._shards[number]
        if not shard.is_remote:
            return f"run {kway_command('shard', 'verify', shard.folder)}"
        assert self._cache is not None
        return f"delete the cached copy {self._cache.path(shard.cached_name)} and retry"

    def read(self, number: int, read: Callable[..., Answer], *where: Any) -> Answer:
        """Return `read(descriptor, *where)` for a shard. Retries after a transient error."""
        attempt = 1
        while True:
            try:
                return read(self._open(number), *where)
            except OSError as error:
                if (descriptor := self.opened.pop(number, None)) is not None:
                    os.close(descriptor)  # a stale descriptor does not recover
                wait_before_retry(self._shards[number].address, error, attempt)
            attempt += 1

    def _open(self, number: int) -> int:
        """Return the descriptor of a shard, which is opened if necessary."""
        if (descriptor := self.opened.get(number)) is not None:
            return descriptor
        shard = self._shards[number]
        if isinstance(shard.folder, Path):
            descriptor = os.open(shard.folder / shard.info.file, os.O_RDONLY)
        else:
            assert self._cache is not None
            fill, size = self._fill(shard), shard.info.bytes
            descriptor = self._cache.open(shard.cached_name, fill, size=size)
        for other, opened in list(self.opened.items()):
            # An evicted shard occupies disk space until its descriptor is closed.
            evicted = self.is_remote and os.fstat(opened).st_nlink == 0
            if evicted or len(self.opened) >= self._max_files:
                os.close(self.opened.pop(other))
        self.opened[number] = descriptor
        return descriptor

    def _fill(self, shard: Shard) -> Callable[[IO[bytes]], None]:
        attempts, size, sha256 = self._config.attempts, shard.info.bytes, shard.info.sha256
        return partial(fetch, shard.address, attempts=attempts, max_bytes=size, sha256=sha256)

    def close(self) -> None:
        """Close all files and start no more downloads. A later read opens files again."""
        self._queue.clear()
        self._read_group = None
        while self.opened:
            os.close(self.opened.popitem()[1])

    # ---------------------------------------------------------------- prefetching

    def will_read(self, order: Order | None, position: int) -> None:
        """Fetch the shards at URLs that are read at `position` and after it: those of the current
        group of `order` and of the next one or, without an order, the current shard and the next.

        The call is cheap if the group is unchanged. Once a minute, the shards of the group are
        marked as in use, so that they are not evicted.
        """
        if self._cache is None:
            return
        if order is not None:
            group = order.group(position)
        else:
            group = int(np.searchsorted(self._ends, position, side="right"))
        current = (order, group)
        if current == self._read_group and time.monotonic() - self._read_at < _TOUCH_SECONDS:
            return
        self._read_group, self._read_at = current, time.monotonic()
        wanted: dict[int, None] = {}
        held = 0
        for one in (group, group + 1):
            found = range(one, one + 1) if order is None else order.shards(one)
            for number in found:
                if number >= len(self._shards) or not self._shards[number].is_remote:
                    continue
                held += self._shards[number].info.bytes * (number not in wanted)
                # Shards of the next group must not evict those of the current one.
                if one == group or held <= self._capacity:
                    wanted[number] = None
        # Each call has its own queue. Threads of the previous call end when their queue is cleared.
        self._queue.clear()
        self._queue = queue = deque(wanted)
        for _ in range(min(_PREFETCH_THREADS, len(queue))):
            Thread(target=self._drain, args=(queue,), daemon=True).start()

    def _drain(self, queue: deque[int]) -> None:
        while queue:
            try:
                shard = self._shards[queue.popleft()]
            except IndexError:
                return
            try:
                assert self._cache is not None
                self._cache.fetch(shard.cached_name, self._fill(shard), size=shard.info.bytes)
            except (OSError, ValueError, RuntimeError) as error:
                # While the interpreter exits, no thread can be started and no task scheduled.
                if not main_thread().is_alive():
                    return
                # The loader raises this error when it reads the shard itself.
                _log.warning("prefetch failed: %s", error)

    def check_order(self, order: Order, groups_at_once: int) -> None:
        """Raise ValueError if remote shards of `groups_at_once` groups do not fit in the cache.

        This checks the worst case, in which the largest shards are all read at the same time.
        """
        if self._cache is None:
            return
        sizes = sorted((s.info.bytes for s in self._shards if s.is_remote), reverse=True)
        at_once = min(order.shards_at_once * groups_at_once, len(sizes))
        if (needed := sum(sizes[:at_once])) <= self._capacity:
            return
        what = "all shards" if order.is_global else f"{at_once} shards at a time"
        enough = _rounded_up(needed + self._config.max_bytes - self._capacity)
        fitting = int(np.searchsorted(np.cumsum(sizes), self._capacity, side="right"))
        raise ValueError(
            f"training reads {what} of {self._urls}, which requires {_gigabytes(needed)} of cache, "
            f"but data.cache.gigabytes is {self._config.gigabytes:g}: raise it to {enough} or "
            f"more, or set data.shuffle_shards to {max(1, fitting // groups_at_once)} or less "
            "(without data.sampling and data.mixture)"
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"


def _rounded_up(count: int) -> str:
    """Return `count` bytes in gigabytes, rounded up to two decimal places."""
    return f"{math.ceil(count / 1e7) / 100:g}"
