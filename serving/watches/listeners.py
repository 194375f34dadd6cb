"""The listeners of each watch and their positions in its stored hits.

The clock is a parameter, so leases do not depend on the system clock.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from serving.tokens import Client
from serving.watches.hit_log import HitLog
from serving.watches.schemas import Dropped, Ended, Listening, Waiting
from serving.watches.watch import HitBatch, ListenerLimitError, UnknownListenerError, Watches

# A replica takes the hits of its listeners every few seconds. If it stops doing so, it is assumed
# to have died.
_LEASE_SECONDS = 60.0
_MAX_BATCH_HITS = 1000


class Listener:
    """A listener. `ready` is set while it may have hits, drops or the end of the watch to
    report."""

    def __init__(self, client: str, watch_id: str, cursor: int, now: float) -> None:
        self.client, self.watch_id, self.taken_at = client, watch_id, now
        self.ready = asyncio.Event()
        self._cursor = cursor
        self._final: HitBatch | None = None

    def end(self, log: HitLog, reason: str) -> None:
        """Read the last hits, which `log` is about to delete."""
        batch, self._cursor = log.after(self.watch_id, self._cursor, most=log.config.max_watch_hits)
        self._final = replace(batch, ended=reason)
        self.ready.set()

    def take(self, log: HitLog) -> HitBatch:
        """Return the next hits."""
        if self._final is not None:
            batch, self._final = self._final, replace(self._final, lines=(), dropped=0)
            return batch
        batch, self._cursor = log.after(self.watch_id, self._cursor, most=_MAX_BATCH_HITS)
        if len(batch.lines) < _MAX_BATCH_HITS:
            self.ready.clear()
        return batch


class Listeners:
    """All listeners, indexed by id and by watch."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listeners: dict[str, Listener] = {}
        self._by_watch: dict[str, set[str]] = {}

    def add(
        self, client: str, watch_id: str, cursor: int, *, max_per_watch: int, max_per_client: int
    ) -> str:
        """Add a listener that reads the hits after `cursor` and return its id. `client` is the key
        that the limit per client applies to. Raises
        ListenerLimitError if the watch or the client has too many listeners."""
        if len(self._by_watch.get(watch_id, ())) >= max_per_watch:
            message = (
                f"this watch has reached its limit of {max_per_watch} listeners. Close another "
                "listener first"
            )
            raise ListenerLimitError(message)
        if sum(one.client == client for one in self._listeners.values()) >= max_per_client:
            message = (
                f"you have reached your limit of {max_per_client} listeners. Close another "
                "listener first"
            )
            raise ListenerLimitError(message)
        listener = secrets.token_hex(8)
        self._by_watch.setdefault(watch_id, set()).add(listener)
        self._listeners[listener] = Listener(client, watch_id, cursor, self._clock())
        return listener

    def get(self, listener: str) -> Listener:
        """Return a listener and renew its lease. Raises UnknownListenerError."""
        found = self._listeners.get(listener)
        if found is None:
            raise UnknownListenerError("the listener has expired")
        found.taken_at = self._clock()
        return found

    def of(self, watch_id: str) -> list[Listener]:
        """Return the listeners of a watch."""
        return [self._listeners[one] for one in self._by_watch.get(watch_id, ())]

    def wake(self, watch_ids: Iterable[str]) -> None:
        """Wake the listeners of watches that have new hits."""
        for watch_id in watch_ids:
            for listener in self.of(watch_id):
                listener.ready.set()

    def remove(self, listener: str) -> None:
        """Remove a listener, if it exists."""
        found = self._listeners.pop(listener, None)
        if found is None:
            return
        others = self._by_watch[found.watch_id]
        others.discard(listener)
        if not others:
            del self._by_watch[found.watch_id]

    def sweep(self) -> None:
        """Remove listeners whose lease has expired."""
        limit = self._clock() - _LEASE_SECONDS
        expired = [key for key, one in self._listeners.items() if one.taken_at < limit]
        for listener in expired:
            self.remove(listener)


# Send a heartbeat line after this time without a hit. The heartbeat also detects dead connections.
WAIT_SECONDS = 10.0


async def listen_to(
    watches: Watches,
    client: Client,
    watch_id: str,
    after: int | None,
    write: Callable[[str], Awaitable[None]],
    on_dropped: Callable[[int], None],
) -> None:
    """Write the hits of a watch after a cursor, by default only new ones, until it ends.

    Raises UnknownWatchError, UnknownCursorError and ListenerLimitError before the first line, and
    UnknownListenerError and WatchesDownError at any time.
    """
    listener, cursor = await watches.listen(client.name, watch_id, after, client.limit_key)
    try:
        await write(Listening(listening=watch_id, cursor=cursor).model_dump_json())
        while True:
            batch = await watches.take(listener, WAIT_SECONDS)
            if batch.dropped:
                on_dropped(batch.dropped)
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
