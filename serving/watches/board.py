"""`Board` stores all watches and their listeners and implements `Watches` in a single event loop.

The Ray actor (`serving/deploy/watch_actor.py`) runs a `Board` in its own process.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from serving.config import ServingConfig
from serving.watches.listeners import Listeners
from serving.watches.storage import MemoryStorage, Storage
from serving.watches.watch import (
    Changes,
    HitBatch,
    Terms,
    UnknownWatchError,
    Watch,
    WatchLimitError,
    WatchState,
)

# A replica that has missed more removals than this receives the complete list.
_REMEMBERED_REMOVALS = 1000


class Registry:
    """Stores the watches within the limits of `config`. `storage` maps their ids to JSON.

    Every change increments `version`, so a replica can request the changes since its own version.
    Versions restart from 0 with the process; `epoch` identifies the process.
    """

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float],
        storage: Storage,
    ) -> None:
        self.config = config
        self.epoch, self.version = secrets.token_hex(8), 0
        self._clock, self._storage = clock, storage
        watches = [Watch.model_validate_json(text) for _, text in storage.items()]
        self._watches = {watch.id: watch for watch in watches}
        self._changed_at = dict.fromkeys(self._watches, 0)
        self._listened: set[str] = set()
        self._removals: deque[tuple[int, str]] = deque()
        self._removals_known_since = 0

    def create(self, client: str, terms: Terms) -> Watch:
        """Create a watch. Raises WatchLimitError if there are too many watches."""
        self._check_limits(client)
        now = self._clock()
        # Dump only the fields of Terms, so that `terms` cannot set the other fields of Watch.
        watch = Watch(
            **terms.model_dump(include=set(Terms.model_fields)),
            id=secrets.token_hex(8),
            client=client,
            created_at=now,
            expires_at=now + terms.ttl_seconds,
        )
        self._put(watch)
        return watch

    def owned(self, client: str) -> list[Watch]:
        """Return the client's watches, oldest first."""
        mine = [watch for watch in self._watches.values() if watch.client == client]
        return sorted(mine, key=lambda watch: watch.created_at)

    def get(self, client: str, watch_id: str) -> Watch:
        """Return a watch. Raises UnknownWatchError, even if the watch belongs to another client."""
        watch = self._watches.get(watch_id)
        if watch is None or watch.client != client or watch.expires_at <= self._clock():
            raise UnknownWatchError(
                f"watch {watch_id[:40]!r} does not exist: it may have expired or been deleted"
            )
        return watch

    def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        """Replace `fields` of a watch's terms and restart its time to live."""
        unknown = set(fields) - set(Terms.model_fields)
        assert not unknown, f"{unknown} are not fields of Terms"
        watch = self.get(client, watch_id).model_copy(update=dict(fields))
        watch = watch.model_copy(update={"expires_at": self._clock() + watch.ttl_seconds})
        self._put(watch)
        return watch

    def remove(self, client: str, watch_id: str) -> None:
        """Delete a watch. Raises UnknownWatchError, even if the watch belongs to another client."""
        self._drop(self.get(client, watch_id).id)

    def sweep(self) -> list[str]:
        """Remove expired watches and return their ids."""
        now = self._clock()
        expired = [watch.id for watch in self._watches.values() if watch.expires_at <= now]
        for watch_id in expired:
            self._drop(watch_id)
        return expired

    def set_listened(self, watch_id: str, is_listened: bool) -> None:
        """Record whether a watch has listeners. Does nothing if the watch no longer exists."""
        if watch_id in self._watches and (watch_id in self._listened) != is_listened:
            (self._listened.add if is_listened else self._listened.discard)(watch_id)
            self._record_change(watch_id)

    def changes_since(self, epoch: str, version: int) -> Changes:
        """Return the changes since `version`, or the complete list if the epoch differs or the
        version is too old."""
        is_complete = epoch != self.epoch or version < self._removals_known_since
        states = [
            WatchState(watch, watch.id in self._listened)
            for watch in self._watches.values()
            if is_complete or self._changed_at[watch.id] > version
        ]
        removed = [watch_id for at, watch_id in self._removals if at > version and not is_complete]
        now = self._clock()
        return Changes(self.epoch, self.version, now, is_complete, tuple(states), tuple(removed))

    def _check_limits(self, client: str) -> None:
        limit = self.config.max_watches_per_client
        if len(self.owned(client)) >= limit:
            raise WatchLimitError(
                f"you have reached your limit of {limit} watches. Delete another watch first"
            )
        limit = self.config.max_watches
        if len(self._watches) >= limit:
            raise WatchLimitError(
                f"the server has reached its limit of {limit} watches. Try again later"
            )

    def _put(self, watch: Watch) -> None:
        self._storage.apply({watch.id: watch.model_dump_json().encode()})
        self._watches[watch.id] = watch
        self._record_change(watch.id)

    def _record_change(self, watch_id: str) -> None:
        self.version += 1
        self._changed_at[watch_id] = self.version

    def _drop(self, watch_id: str) -> None:
        self._storage.apply({watch_id: None})
        del self._watches[watch_id], self._changed_at[watch_id]
        self._listened.discard(watch_id)
        self.version += 1
        self._removals.append((self.version, watch_id))
        if len(self._removals) > _REMEMBERED_REMOVALS:
            self._removals_known_since, _ = self._removals.popleft()


class SteadyClock:
    """Returns seconds since 1970 from a monotonic clock, so that watches and listeners expire
    correctly even if the system clock is changed."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._start + time.monotonic()


class Board:
    """The registry and the listeners, with long polls that wait for changes."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float] | None = None,
        storage: Storage | None = None,
    ) -> None:
        clock = SteadyClock() if clock is None else clock
        storage = MemoryStorage() if storage is None else storage
        self._registry = Registry(config, clock=clock, storage=storage)
        self._listeners = Listeners(clock)
        self._listened: set[str] = set()
        self._change = asyncio.Event()
        self._announced_version = 0

    async def configure(self, config: ServingConfig) -> None:
        """Replace the limits, which may differ in a new version of the application."""
        self._registry.config = config

    async def create(self, client: str, terms: Terms) -> Watch:
        self._sweep()
        watch = self._registry.create(client, terms)
        self._announce()
        return watch

    async def owned(self, client: str) -> list[Watch]:
        self._sweep()
        return self._registry.owned(client)

    async def get(self, client: str, watch_id: str) -> Watch:
        return self._registry.get(client, watch_id)

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        watch = self._registry.change(client, watch_id, fields)
        self._announce()
        return watch

    async def remove(self, client: str, watch_id: str) -> None:
        self._registry.remove(client, watch_id)
        self._end(watch_id, "deleted")
        self._announce()

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        self._sweep()
        if (epoch, version) == (self._registry.epoch, self._registry.version):
            await _wait_for(self._change, wait_seconds)
            self._sweep()
        return self._registry.changes_since(epoch, version)

    async def publish(self, hits: Sequence[tuple[str, str]], lost: Mapping[str, int]) -> None:
        for watch_id, count in lost.items():
            for listener in self._listeners.of(watch_id):
                listener.drop(count)
        for watch_id, line in hits:
            for listener in self._listeners.of(watch_id):
                listener.put(line)

    async def listen(self, client: str, watch_id: str) -> str:
        self._sweep()
        self._registry.get(client, watch_id)
        config = self._registry.config
        listener = self._listeners.add(
            client,
            watch_id,
            max_per_watch=config.max_watch_listeners,
            max_per_client=config.max_listeners_per_client,
            max_hits=config.max_listener_hits,
        )
        self._announce()
        return listener

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        state = self._listeners.get(listener)
        await _wait_for(state.ready, wait_seconds)
        self._sweep()
        return state.take()

    async def leave(self, listener: str) -> None:
        self._listeners.remove(listener)
        self._announce()

    def _sweep(self) -> None:
        """Remove expired watches and the listeners of replicas that have died."""
        for watch_id in self._registry.sweep():
            self._end(watch_id, "expired")
        self._listeners.sweep()
        self._announce()

    def _end(self, watch_id: str, reason: str) -> None:
        for listener in self._listeners.of(watch_id):
            listener.end(reason)

    def _announce(self) -> None:
        """Update which watches have listeners. If anything has changed, wake the waiting polls.

        The event is set and replaced: waiting polls have a reference to the old event, and later
        polls wait for the next change.
        """
        listened = self._listeners.listened()
        for watch_id in self._listened ^ listened:
            self._registry.set_listened(watch_id, watch_id in listened)
        self._listened = listened
        if self._registry.version != self._announced_version:
            self._announced_version = self._registry.version
            self._change.set()
            self._change = asyncio.Event()


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
