"""A served gallery: the items of its files and the changes since it was built.

Inserted items are not in the index: each search compares all of them. If the gallery is built again
and then contains an item of the same name, that item replaces the inserted one.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from serving.galleries.changes import (
    GalleryChanges,
    GalleryUpdate,
    InsertedItem,
    NameInUseError,
    UnknownItemError,
)
from serving.galleries.format import shown_name
from serving.galleries.gallery import Gallery
from serving.galleries.item import Item
from serving.watches.watch import WatchesDownError

# How often to request the changes while the process that stores them does not respond.
_RETRY_SECONDS = 1.0
_log = logging.getLogger("kway.serving")


class ShownItem(NamedTuple):
    """What a search returns about an item. `item` is its index, or None if it was inserted."""

    id: str
    item: int | None
    name: str
    text: str | None


@dataclass(frozen=True)
class Snapshot:
    """A version of a gallery. The positions of its items are 0 … `base.num_items` - 1 for the items
    of the files, some of which are `deleted`, and then those of the inserted items."""

    base: Gallery
    version: tuple[str, int] = ("", 0)
    deleted: frozenset[int] = frozenset()
    inserted: tuple[InsertedItem, ...] = ()
    features: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def num_items(self) -> int:
        return self.base.num_items - len(self.deleted) + len(self.inserted)

    def deleted_positions(self) -> np.ndarray:
        return np.fromiter(self.deleted, np.int64, len(self.deleted))

    def show(self, position: int) -> ShownItem:
        if position >= self.base.num_items:
            item = self.inserted[position - self.base.num_items]
            return ShownItem(item.id, None, item.name, item.text)
        found = self.base.item(position)
        return ShownItem(self.base.id_of(position), position, shown_name(found.name), found.text)

    def position(self, item_id: str) -> int:
        """Return the position of an item. Raises UnknownItemError."""
        for offset, item in enumerate(self.inserted):
            if item.id == item_id:
                return self.base.num_items + offset
        index = self.base.index_of_id(item_id)
        if index is None or index in self.deleted:
            raise UnknownItemError(
                f"the gallery does not contain an item with the id {item_id[:40]!r}. Search again: "
                "the item may have been deleted, or the gallery built again"
            )
        return index

    def features_of(self, position: int) -> np.ndarray:
        """Return a copy of the features of an item, float32 [dim]."""
        first = self.base.num_items
        found = (
            self.features[position - first] if position >= first else self.base.features[position]
        )
        return np.array(found)

    def contains_name(self, name: str) -> bool:
        index = self.base.find(name)
        return (index is not None and index not in self.deleted) or any(
            item.name == name for item in self.inserted
        )


class LiveGallery:
    """A gallery and its changes, which `refresh` brings up to date. `key` identifies the gallery
    and the backbone of its features in `changes`."""

    def __init__(self, base: Gallery, changes: GalleryChanges, key: str) -> None:
        self.base, self.key = base, key
        self.snapshot = Snapshot(base)
        self._changes = changes
        self._lock, self._apply_lock = asyncio.Lock(), Lock()
        self._started = 0  # number of requests for changes
        self._failure: str | None = None  # why the last request failed
        self._retry_at = 0.0
        self._inserted: dict[str, InsertedItem] = {}
        self._deleted: set[int] = set()

    async def refresh(self, *, must_be_current: bool = False) -> Snapshot:
        """Return a version that contains all changes that were complete when this was called.

        If the process that stores the changes does not respond, returns the version of the last
        request. Raises WatchesDownError if there was none or if `must_be_current`.
        """
        started = self._started
        async with self._lock:
            if self._started == started:  # otherwise, another caller's request began after this
                self._started += 1
                await self._update()
            if self._failure is not None and (must_be_current or not self.snapshot.version[0]):
                raise WatchesDownError(self._failure)
            return self.snapshot

    async def insert(self, items: Sequence[InsertedItem]) -> None:
        """Insert all items or none. Raises NameInUseError, GalleryFullError and
        WatchesDownError."""
        snapshot = await self.refresh(must_be_current=True)
        for item in items:
            if await asyncio.to_thread(snapshot.contains_name, item.name):
                raise NameInUseError(f"the gallery already contains an item named {item.name}")
        await self._changes.insert_items(self.key, items)

    async def delete(self, item_id: str) -> None:
        """Delete an item. Raises UnknownItemError, GalleryFullError and WatchesDownError."""
        position = (await self.refresh(must_be_current=True)).position(item_id)
        if position < self.base.num_items:
            await self._changes.delete_item(self.key, self.base.item(position))
        else:
            await self._changes.remove_item(self.key, item_id)

    async def thumbnail(self, index_or_id: str) -> bytes:
        """Return a thumbnail, or empty bytes if the gallery has none. Raises UnknownItemError."""
        snapshot = await self.refresh()
        is_index = index_or_id.isdecimal() and int(index_or_id) < self.base.num_items
        item_id = index_or_id
        if is_index:
            item_id = self.base.id_of(int(index_or_id))
        position = snapshot.position(item_id)
        if position < self.base.num_items:
            return await asyncio.to_thread(self.base.thumbnail, position)
        return await self._changes.inserted_thumbnail(self.key, item_id)

    async def _update(self) -> None:
        epoch, version = self.snapshot.version
        if self._failure is not None and epoch and time.monotonic() < self._retry_at:
            return
        try:
            changes = await self._changes.gallery_changes(self.key, epoch, version)
            self._failure = None
        except WatchesDownError as error:
            _log.warning("cannot read the changes of a gallery: %s", error)
            self._failure, self._retry_at = str(error), time.monotonic() + _RETRY_SECONDS
            return
        if (changes.epoch, changes.version) != (epoch, version):
            for item_id in await asyncio.to_thread(self._apply, changes, (epoch, version)):
                await self._remove(item_id)

    def _apply(self, changes: GalleryUpdate, since: tuple[str, int]) -> list[str]:
        """Set the next snapshot. Returns the ids of inserted items that the files replace."""
        # A request that is cancelled releases the other lock before this has finished.
        with self._apply_lock:
            return self._next_snapshot(changes) if self.snapshot.version == since else []

    def _next_snapshot(self, changes: GalleryUpdate) -> list[str]:
        if changes.is_complete:
            self._inserted, self._deleted = {}, set()
        for item in changes.deleted:
            index = self.base.find(item.name)
            # A file that has changed since then is another item.
            if index is not None and _is_same(self.base.item(index), item):
                self._deleted.add(index)
        for item_id in changes.removed:
            self._inserted.pop(item_id, None)
        self._inserted |= {item.id: item for item in changes.inserted}
        replaced = [item.id for item in changes.inserted if self._is_replaced(item)]
        for item_id in replaced:
            del self._inserted[item_id]
        inserted = tuple(self._inserted.values())
        rows = b"".join(item.features for item in inserted)
        self.snapshot = Snapshot(
            base=self.base,
            version=(changes.epoch, changes.version),
            deleted=frozenset(self._deleted),
            inserted=inserted,
            features=np.frombuffer(rows, "<f4").reshape(-1, self.base.info.dim),
        )
        return replaced

    def _is_replaced(self, item: InsertedItem) -> bool:
        index = self.base.find(item.name)
        return index is not None and index not in self._deleted

    async def _remove(self, item_id: str) -> None:
        # Another replica may have removed it. If this fails, it is removed after the next start.
        with suppress(UnknownItemError, WatchesDownError):
            await self._changes.remove_item(self.key, item_id)


def _is_same(item: Item, other: Item) -> bool:
    return item[:3] == other[:3]
