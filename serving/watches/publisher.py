"""Hits on their way from a replica to listeners: one bundle at a time, the others wait, bounded.

Nobody waits for it: where it is full the oldest are dropped, counted, and their listeners told.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from serving.watches.watch import Watches, WatchesDownError


class HitPublisher:
    """Sends hits to `watches`; used from one event loop."""

    def __init__(self, watches: Watches, *, most: int, on_lost: Callable[[int], None]) -> None:
        self._watches, self._most, self._on_lost = watches, most, on_lost
        self._hits: deque[tuple[str, str]] = deque()
        self._lost: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def put(self, watch_id: str, line: str) -> None:
        """Send a hit of a watch, soon."""
        if len(self._hits) == self._most:
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
                self._lost.update(lost)  # who still listens is told with the next ones
                self._lost.update(watch_id for watch_id, _ in hits)
