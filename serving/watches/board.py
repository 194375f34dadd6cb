"""All watches and their listeners, in one event loop: `Watches` for a single process.

The Ray actor (`serving/deploy/watch_actor.py`) is this, in a process of its own.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from serving.config import ServingConfig
from serving.watches.listeners import Listeners
from serving.watches.registry import Registry
from serving.watches.watch import Changes, Letters, Terms, Watch


class SteadyClock:
    """Seconds since 1970, without jumps: when the system's clock is set, watches live on as long as
    was said, and listeners stay."""

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._start + time.monotonic()


class Board:
    """The registry and the listeners, with those that wait for news of them."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        clock: Callable[[], float] | None = None,
        kept: MutableMapping[str, bytes] | None = None,
    ) -> None:
        clock = SteadyClock() if clock is None else clock
        self._registry = Registry(config, clock=clock, kept={} if kept is None else kept)
        self._listeners = Listeners(clock)
        self._listened: set[str] = set()
        self._change = asyncio.Event()
        self._told_version = 0

    async def configure(self, config: ServingConfig) -> None:
        """Take other limits, as a newer version of the application may have."""
        self._registry.config = config

    async def create(self, client: str, terms: Terms) -> Watch:
        self._sweep()
        watch = self._registry.create(client, terms)
        self._tell()
        return watch

    async def owned(self, client: str) -> list[Watch]:
        self._sweep()
        return self._registry.owned(client)

    async def get(self, client: str, watch_id: str) -> Watch:
        return self._registry.get(client, watch_id)

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        watch = self._registry.change(client, watch_id, fields)
        self._tell()
        return watch

    async def remove(self, client: str, watch_id: str) -> None:
        self._registry.remove(client, watch_id)
        self._end(watch_id, "deleted")
        self._tell()

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        self._sweep()
        if (epoch, version) == (self._registry.epoch, self._registry.version):
            await _set_within(self._change, wait_seconds)
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
        listener = self._listeners.join(
            client,
            watch_id,
            most=config.max_watch_listeners,
            most_each=config.max_listeners_per_client,
            most_hits=config.max_listener_hits,
        )
        self._tell()
        return listener

    async def take(self, listener: str, wait_seconds: float) -> Letters:
        found = self._listeners.get(listener)
        await _set_within(found.news, wait_seconds)
        self._sweep()
        return found.take()

    async def leave(self, listener: str) -> None:
        self._listeners.leave(listener)
        self._tell()

    def _sweep(self) -> None:
        """Drop what is over: watches, and listeners whose replica has died."""
        for watch_id in self._registry.sweep():
            self._end(watch_id, "expired")
        self._listeners.sweep()
        self._tell()

    def _end(self, watch_id: str, reason: str) -> None:
        for listener in self._listeners.of(watch_id):
            listener.end(reason)

    def _tell(self) -> None:
        """Note who is listened to now, and wake those that wait for a change, if there was one."""
        listened = self._listeners.listened()
        for watch_id in self._listened ^ listened:
            self._registry.set_listened(watch_id, watch_id in listened)
        self._listened = listened
        if self._registry.version != self._told_version:
            self._told_version = self._registry.version
            self._change.set()
            self._change = asyncio.Event()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
