"""The replica's side of watches: a local copy, which long polling updates while feeds are
connected, and the hits to store.

If the process that stores the watches does not respond, the replica continues with its copy.
Watches in the copy still expire. Frames with hits wait until their hits are stored.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from serving.watches.watch import Changes, Watch, Watches, WatchesDownError

_POLL_SECONDS = 10.0
_RETRY_SECONDS = 0.5
# The position of a feed is stored with the next hits, or after this time.
_POSITION_SECONDS = 1.0
# Hits that are sent in one call, unless a single frame has more.
_MAX_BATCH_HITS = 10_000
_log = logging.getLogger("kway.serving")


class LiveWatches:
    """The local copy of the watches. Use it from a single event loop. `version` changes whenever
    the copy changes."""

    def __init__(self, watches: Watches) -> None:
        self._watches = watches
        self._copy: dict[str, Watch] = {}
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

    def of(self, feed: str) -> list[Watch]:
        """Return the watches that select a feed."""
        return [watch for watch in self._copy.values() if watch.selects(feed)]

    def now(self) -> float:
        """Return the time of the clock that determines when watches expire. It does not depend on
        this machine's clock."""
        return time.monotonic() + self._clock_offset

    def __contains__(self, watch_id: object) -> bool:
        return watch_id in self._copy

    def __len__(self) -> int:
        return len(self._copy)

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
            self._copy = {}
        for watch_id in changes.removed:
            self._copy.pop(watch_id, None)
        self._copy.update((watch.id, watch) for watch in changes.watches)
        self.version = (changes.epoch, changes.version)


class _Frame(NamedTuple):
    """The hits of a frame, and where to report their cursors."""

    hits: Sequence[tuple[str, str]]
    cursors: asyncio.Future[list[int | None]]


class HitPublisher:
    """Stores hits and the positions of feeds in `watches`. Use it from a single event loop.

    Frames that arrive during a call share the next one. The number of frames that wait is limited
    by the number of frames that the feeds process concurrently.
    """

    def __init__(self, watches: Watches, *, retry_seconds: float) -> None:
        self._watches, self._retry_seconds = watches, retry_seconds
        self._frames: list[_Frame] = []
        self._positions: dict[tuple[str, str], str | int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def store(self, hits: Sequence[tuple[str, str]]) -> list[int | None]:
        """Store the hits of a frame, as pairs (watch id, line of JSON), and return their cursors.
        The cursor is None if the watch has ended.

        Raises WatchesDownError if they could not be stored for `retry_seconds`.
        """
        frame = _Frame(hits, asyncio.get_running_loop().create_future())
        self._frames.append(frame)
        self._start()
        return await frame.cursors

    def set_position(self, client: str, feed: str, frame: str | int) -> None:
        """Set the id of the last answered frame of a feed. It is stored soon."""
        self._positions[client, feed] = frame
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_POSITION_SECONDS, self._start)

    async def flush(self) -> None:
        """Store the positions. If this fails, they are stored with the next hits."""
        with suppress(WatchesDownError):
            await self.store([])

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._frames or (self._positions and self._timer is None):
            frames = self._next_frames()
            positions, self._positions = self._positions, {}
            try:
                hits = [hit for frame in frames for hit in frame.hits]
                cursors = iter(await self._publish(hits, positions))
            except WatchesDownError as error:
                self._positions = positions | self._positions
                for frame in frames:
                    if not frame.cursors.done():
                        frame.cursors.set_exception(WatchesDownError(str(error)))
                if not self._frames:
                    return  # positions are stored with the next hits
            else:
                for frame in frames:
                    found = [next(cursors) for _ in frame.hits]
                    if not frame.cursors.done():
                        frame.cursors.set_result(found)

    def _next_frames(self) -> list[_Frame]:
        count = total = 0
        for frame in self._frames:
            total += len(frame.hits)
            if count and total > _MAX_BATCH_HITS:
                break
            count += 1
        frames, self._frames = self._frames[:count], self._frames[count:]
        return frames

    async def _publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_seconds
        while True:
            try:
                return await self._watches.publish(hits, positions)
            except WatchesDownError:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)
