"""The replica's side of watches: a local copy, which long polling updates while feeds are
connected, and a queue of hits to publish.

If the process that stores the watches does not respond, the replica continues with its copy.
Watches in the copy still expire.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from serving.watches.watch import Changes, Watches, WatchesDownError, WatchState

_POLL_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_log = logging.getLogger("kway.serving")


class LiveWatches:
    """The local copy of the watches. Use it from a single event loop. `version` changes whenever
    the copy changes."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._states: dict[str, WatchState] = {}
        self.version: tuple[str, int] = ("", 0)
        self._clock_offset = 0.0
        self._followers = 0
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Keep the copy up to date inside the context. On entry, the copy contains all existing
        watches.

        Raises WatchesDownError if the first update fails.
        """
        await self._refresh(0)
        self._followers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers:
                self._task.cancel()
                self._task = None

    def of(self, feed: str, client: str) -> list[WatchState]:
        """Return the watches that select a feed and have a recipient for their hits: the watches of
        `client`, which sends the frames, and watches with listeners."""
        return [
            one
            for one in self._states.values()
            if one.watch.selects(feed) and (one.is_listened or one.watch.client == client)
        ]

    def now(self) -> float:
        """Return the time of the clock that determines when watches expire. It does not depend on
        this machine's clock."""
        return time.monotonic() + self._clock_offset

    def __len__(self) -> int:
        return len(self._states)

    async def _follow(self) -> None:
        is_down = False
        while True:
            try:
                await self._refresh(_POLL_SECONDS)
                is_down = False
            except WatchesDownError as error:
                if not is_down:
                    _log.warning(
                        "failed to update the watches; continuing with the last copy: %s", error
                    )
                is_down = True
                await asyncio.sleep(_RETRY_SECONDS)

    async def _refresh(self, wait_seconds: float) -> None:
        epoch, version = self.version
        self._apply(await self._watches.changed_since(epoch, version, wait_seconds))

    def _apply(self, changes: Changes) -> None:
        self._clock_offset = changes.now - time.monotonic()
        epoch, version = self.version
        if changes.epoch == epoch and changes.version <= version:
            return  # another poll has already applied these changes
        if changes.is_complete:
            self._states = {}
        for watch_id in changes.removed:
            self._states.pop(watch_id, None)
        self._states.update((one.watch.id, one) for one in changes.states)
        self.version = (changes.epoch, changes.version)


class HitPublisher:
    """Publishes hits to `watches`. Use it from a single event loop."""

    def __init__(self, watches: Watches, *, max_hits: int, on_lost: Callable[[int], None]) -> None:
        self._watches, self._max_hits, self._on_lost = watches, max_hits, on_lost
        self._hits: deque[tuple[str, str]] = deque()
        self._lost: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def put(self, watch_id: str, line: str) -> None:
        """Queue a hit of a watch for publication. If the queue is full, the oldest hit is lost."""
        if len(self._hits) == self._max_hits:
            lost, _ = self._hits.popleft()
            self._lost[lost] += 1
            self._on_lost(1)
        self._hits.append((watch_id, line))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._hits:
            hits, lost = list(self._hits), dict(self._lost)
            self._hits.clear()
            self._lost.clear()
            try:
                await self._watches.publish(hits, lost)
            except WatchesDownError:
                self._on_lost(len(hits))
                self._lost.update(lost)  # reported to listeners with the next batch
                self._lost.update(watch_id for watch_id, _ in hits)
