"""The listeners of each watch and their queues of hits, which are bounded and keep the newest.

The clock is passed in, so lease times do not depend on the system's clock.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

from serving.watches.schemas import Dropped, Ended, Listening, Waiting
from serving.watches.watch import HitBatch, ListenerLimitError, UnknownListenerError, Watches

# Replicas take the hits of a listener every few seconds. If they stop, the replica has died.
_LEASE_SECONDS = 60.0


class Listener:
    """One listener; `news` is set while something waits for it."""

    def __init__(self, client: str, watch_id: str, most: int, now: float) -> None:
        self.client, self.watch_id, self.taken_at = client, watch_id, now
        self.news = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=most)
        self._dropped = 0
        self.ended: str | None = None

    def put(self, line: str) -> None:
        self._dropped += len(self._lines) == self._lines.maxlen
        self._lines.append(line)
        self.news.set()

    def drop(self, count: int) -> None:
        self._dropped += count
        self.news.set()

    def end(self, reason: str) -> None:
        self.ended = reason
        self.news.set()

    def take(self) -> HitBatch:
        batch = HitBatch(tuple(self._lines), self._dropped, self.ended)
        self._lines.clear()
        self._dropped = 0
        self.news.clear()
        return batch


class Listeners:
    """All listeners, by id and by watch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listeners: dict[str, Listener] = {}
        self._by_watch: dict[str, set[str]] = {}

    def join(self, client: str, watch_id: str, *, most: int, most_each: int, most_hits: int) -> str:
        """Add a listener to a watch and return its id. A watch may have `most` listeners and a
        client `most_each`; raises ListenerLimitError beyond that."""
        if len(self._by_watch.get(watch_id, ())) >= most:
            message = f"{most} listen to this watch, and no more may: end one of them"
            raise ListenerLimitError(message)
        if sum(one.client == client for one in self._listeners.values()) >= most_each:
            message = f"{most_each} listen to your watches, and no more may: end one of them"
            raise ListenerLimitError(message)
        listener = secrets.token_hex(8)
        self._by_watch.setdefault(watch_id, set()).add(listener)
        self._listeners[listener] = Listener(client, watch_id, most_hits, self._clock())
        return listener

    def get(self, listener: str) -> Listener:
        """Raises UnknownListenerError. Renews the lease of the listener."""
        found = self._listeners.get(listener)
        if found is None:
            raise UnknownListenerError("hits for it are no longer kept: some may be lost")
        found.taken_at = self._clock()
        return found

    def of(self, watch_id: str) -> list[Listener]:
        """The listeners of one watch."""
        return [self._listeners[one] for one in self._by_watch.get(watch_id, ())]

    def leave(self, listener: str) -> None:
        """Remove a listener, if it exists."""
        found = self._listeners.pop(listener, None)
        if found is None:
            return
        others = self._by_watch[found.watch_id]
        others.discard(listener)
        if not others:
            del self._by_watch[found.watch_id]

    def sweep(self) -> None:
        """Remove listeners whose hits have not been taken for too long."""
        before = self._clock() - _LEASE_SECONDS
        late = [key for key, one in self._listeners.items() if one.taken_at < before]
        for listener in late:
            self.leave(listener)

    def listened(self) -> set[str]:
        """The ids of watches that have listeners."""
        return set(self._by_watch)


# After this long without a hit, send a heartbeat line. It also detects dead connections.
WAIT_SECONDS = 10.0


async def listen_to(
    watches: Watches, client: str, watch_id: str, write: Callable[[str], Awaitable[None]]
) -> None:
    """Write the hits of a watch until it ends.

    Raises UnknownWatchError and ListenerLimitError before the first line, and UnknownListenerError
    and WatchesDownError at any time.
    """
    listener = await watches.listen(client, watch_id)
    try:
        await write(Listening(listening=watch_id).model_dump_json())
        while True:
            batch = await watches.take(listener, WAIT_SECONDS)
            if batch.dropped:
                await write(Dropped(dropped=batch.dropped).model_dump_json())
            for line in batch.lines:
                await write(line)
            if batch.ended is not None:
                await write(Ended(end=batch.ended).model_dump_json())
                return
            if not batch.lines and not batch.dropped:
                await write(Waiting().model_dump_json())
    finally:
        await watches.leave(listener)
