"""The watches of one model.

One store contains the watches of all models of a server. A client of another model than the default
one is stored as MODEL/CLIENT. Names of clients do not contain a slash.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from serving.watches.watch import Changes, HitBatch, Terms, Watch, Watches


class ModelWatches:
    """`Watches` of the model `name`; None: the default model. Limits per client apply to each
    model."""

    def __init__(self, watches: Watches, name: str | None) -> None:
        self._all, self._prefix = watches, "" if name is None else f"{name}/"

    async def create(self, client: str, terms: Terms) -> Watch:
        return self._own(await self._all.create(self._prefix + client, terms))

    async def owned(self, client: str) -> list[Watch]:
        return [self._own(watch) for watch in await self._all.owned(self._prefix + client)]

    async def get(self, client: str, watch_id: str) -> Watch:
        return self._own(await self._all.get(self._prefix + client, watch_id))

    async def change(self, client: str, watch_id: str, fields: Mapping[str, object]) -> Watch:
        return self._own(await self._all.change(self._prefix + client, watch_id, fields))

    async def remove(self, client: str, watch_id: str) -> None:
        await self._all.remove(self._prefix + client, watch_id)

    async def changed_since(self, epoch: str, version: int, wait_seconds: float) -> Changes:
        changes = await self._all.changed_since(epoch, version, wait_seconds)
        own = tuple(self._own(watch) for watch in changes.watches if self._is_own(watch))
        return replace(changes, watches=own)

    async def publish(
        self, hits: Sequence[tuple[str, str]], positions: Mapping[tuple[str, str], str | int]
    ) -> list[int | None]:
        own = {(self._prefix + client, feed): at for (client, feed), at in positions.items()}
        return await self._all.publish(hits, own)

    async def position(self, client: str, feed: str) -> str | int | None:
        return await self._all.position(self._prefix + client, feed)

    async def listen(
        self, client: str, watch_id: str, after: int | None, limit_key: str | None = None
    ) -> tuple[str, int]:
        return await self._all.listen(self._prefix + client, watch_id, after, limit_key or client)

    async def take(self, listener: str, wait_seconds: float) -> HitBatch:
        return await self._all.take(listener, wait_seconds)

    async def leave(self, listener: str) -> None:
        await self._all.leave(listener)

    def _is_own(self, watch: Watch) -> bool:
        prefix, _, client = watch.client.rpartition("/")
        return bool(client) and self._prefix == (f"{prefix}/" if prefix else "")

    def _own(self, watch: Watch) -> Watch:
        if not self._prefix:
            return watch
        return watch.model_copy(update={"client": watch.client.removeprefix(self._prefix)})
