"""`Board` stores all watches and their listeners and implements `Watches` in a single event loop.

The Ray actor (`serving/deploy/watch_actor.py`) runs a `Board` in its own process.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from serving.config import ServingConfig
from serving.watches.feed_positions import FeedPositions
from serving.watches.hit_log import HitLog
from serving.watches.listeners import Listeners
from serving.watches.registry import Registry
from serving.watches.storage import MemoryStorage, Storage
from serving.watches.watch import Changes, HitBatch, Terms, UnknownCursorError, Watch
from serving.watches.webhooks import DeliveryCounts, NoDeliveryCounts, Webhooks


class SteadyClock:
    """Returns seconds since 1970 from a monotonic clock, so that watches and listeners expire
    correctly even if the system clock is changed."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._start + time.monotonic()


class Board:
    """The registry, the hits, the listeners and the webhooks, with long polls that wait for
    changes."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float] | None = None,
        storage: Storage | None = None,
        counts: DeliveryCounts | None = None,
    ) -> None:
        clock = SteadyClock() if clock is None else clock
        storage = MemoryStorage() if storage is None else storage
        self._registry = Registry(config, clock=clock, storage=storage)
        self._listeners = Listeners(clock)
        self._log = HitLog(config, storage, watches=self._registry, on_stored=self._on_stored)
        self._positions = FeedPositions(storage)
        self._webhooks = Webhooks(
            config,
            storage,
            registry=self._registry,
            log=self._log,
            clock=clock,
            counts=NoDeliveryCounts() if counts is None else counts,
        )
        self._change = asyncio.Event()
        self._announced_version = 0

    async def configure(self, config: ServingConfig) -> None:
        """Replace the limits, which may differ in a new version of the application."""
        self._registry.config = self._log.config = self._webhooks.config = config

    async def resume(self) -> None:
        """Start to deliver the hits that an earlier process has stored but not delivered."""
        self._webhooks.resume()

    async def close(self) -> None:
        """Stop the deliveries. Use this before the event loop ends."""
        await self._webhooks.close()

    async def create(self, client: str, terms: Terms) -> Watch:
        self._sweep()
        watch = self._registry.create(client, terms)
        self._webhooks.update(watch)
        self._announce()
        return self._webhooks.shown(watch)

    async def owned(self, client: str) -> list[Watch]:
        self._sweep()
        return [self._webhooks.shown(watch) for watch in self._registry.owned(client)]

    async def get(self, client: str, watch_id: str) -> Watch:
        return self._webhooks.shown(self._registry.get(client, watch_id))

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        before = self._registry.get(client, watch_id)
        if before.webhook is None and fields.get("webhook") is not None:
            await self._webhooks.begin(watch_id)
        watch = self._registry.change(client, watch_id, fields)
        if "webhook" in fields:
            self._webhooks.update(watch)
        self._announce()
        return self._webhooks.shown(watch)

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

    async def publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        cursors = await self._log.append(hits, self._positions.changes(positions))
        self._log.delete(self._positions.update(positions))
        return cursors

    async def position(self, client: str, feed: str) -> str | int | None:
        return self._positions.get(client, feed)

    async def listen(
        self, client: str, watch_id: str, after: int | None, limit_key: str | None = None
    ) -> tuple[str, int]:
        self._sweep()
        self._registry.get(client, watch_id)
        last = self._log.last(watch_id)
        if after is not None and after > last:
            raise UnknownCursorError(
                f"after is {after}, but the newest cursor of this watch is {last}. Use a cursor "
                "that the watch has sent"
            )
        cursor = last if after is None else after
        config = self._registry.config
        listener = self._listeners.add(
            limit_key or client,
            watch_id,
            cursor,
            max_per_watch=config.max_watch_listeners,
            max_per_client=config.max_listeners_per_client,
        )
        if cursor < last:
            self._listeners.wake([watch_id])
        return listener, cursor

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        state = self._listeners.get(listener)
        await _wait_for(state.ready, wait_seconds)
        self._sweep()
        return state.take(self._log)

    async def leave(self, listener: str) -> None:
        self._listeners.remove(listener)

    def _sweep(self) -> None:
        """Remove expired watches and the listeners of replicas that have died."""
        for watch_id in self._registry.sweep():
            self._end(watch_id, "expired")
        self._listeners.sweep()
        self._announce()

    def _on_stored(self, watch_ids: Iterable[str]) -> None:
        watch_ids = list(watch_ids)
        self._listeners.wake(watch_ids)
        self._webhooks.wake(watch_ids)

    def _end(self, watch_id: str, reason: str) -> None:
        for listener in self._listeners.of(watch_id):
            listener.end(self._log, reason)
        self._webhooks.end(watch_id)
        self._log.remove(watch_id)
        self._log.flush()

    def _announce(self) -> None:
        """If a watch has changed, wake the waiting polls.

        The event is set and replaced: waiting polls have a reference to the old event, and later
        polls wait for the next change.
        """
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
