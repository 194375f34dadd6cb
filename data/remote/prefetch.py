"""Prefetches shards: while one group of an order is read, the next group is fetched.

Daemon threads fetch the shards. This affects only speed, not which samples are read.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from threading import Thread, main_thread

from data.loading.order import InOrder, Order
from data.shards.folder import ShardFolder
from data.shards.manifest import ShardInfo

_log = logging.getLogger("kway.data")

_THREADS = 4
_REFRESH_SECONDS = 60.0


class ShardPrefetcher:
    """Prefetches the `shards` of one split in `folder`.

    Call `stop`, or let the threads end with the process. A forked child does not inherit the
    threads, but can start its own.
    """

    def __init__(self, folder: ShardFolder, shards: Sequence[ShardInfo]) -> None:
        self._folder = folder
        self._shards = shards
        self._current: tuple[Order | InOrder, int] | None = None
        self._updated_at = 0.0
        self._queue: deque[ShardInfo] = deque()
        self._waits = False

    def will_read(self, order: Order | InOrder, position: int) -> None:
        """Fetch the shards that `order` reads at `position` and after it: the current group and the
        next one.

        The call is cheap if the group is unchanged. Once a minute, the group and the indices are
        marked as in use, so that they are not evicted. For a local folder, the call has no effect.
        """
        if (capacity := self._folder.bytes_at_once) is None:
            return
        current = (order, order.group(position))
        if current == self._current and time.monotonic() - self._updated_at < _REFRESH_SECONDS:
            return
        self._current, self._updated_at = current, time.monotonic()
        self._start(self._shards_to_fetch(order, current[1], capacity))

    def stop(self) -> None:
        """Do not start any more downloads. Downloads in progress are completed."""
        self._queue.clear()
        self._current = None

    def _shards_to_fetch(
        self, order: Order | InOrder, group: int, capacity: int
    ) -> list[ShardInfo]:
        """Return the shards of a group, and those of the next group that fit in the cache too."""
        wanted = {number: self._shards[number] for number in order.shards(group)}
        held = sum(shard.bytes for shard in wanted.values())
        for number in order.shards(group + 1):
            if number in wanted:
                continue
            held += self._shards[number].bytes
            if held > capacity:
                self._warn_about_small_cache()
                break
            wanted[number] = self._shards[number]
        return list(wanted.values())

    def _warn_about_small_cache(self) -> None:
        if not self._waits:
            self._waits = True
            _log.warning(
                "%s: the next shards do not fit in the cache together with the current ones, so "
                "training waits for downloads: raise data.cache.gigabytes or lower "
                "data.shuffle_shards",
                self._folder,
            )

    def _start(self, shards: Sequence[ShardInfo]) -> None:
        # Each call has its own queue. Threads of the previous call end when their queue is cleared.
        self._queue.clear()
        self._queue = queue = deque(shards)
        for _ in range(min(_THREADS, len(queue))):
            Thread(target=_drain, args=(queue, self._folder), daemon=True).start()
        Thread(target=self._folder.keep_indices, args=(self._shards,), daemon=True).start()


def _drain(queue: deque[ShardInfo], folder: ShardFolder) -> None:
    while queue:
        try:
            shard = queue.popleft()
        except IndexError:
            return
        try:
            folder.prefetch(shard)
        except (OSError, ValueError) as error:
            if not main_thread().is_alive():
                return
            # The loader raises this error when it reads the shard itself.
            _log.warning("prefetch failed: %s", error)
