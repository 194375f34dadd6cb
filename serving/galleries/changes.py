"""Changes of the served galleries: inserted and deleted items, which survive restarts.

`ChangeLog` stores them for all replicas, in the process that also stores the watches. A replica
requests the changes since its own version before each search, so a change is visible to every
search that begins after the change was answered.
"""

import asyncio
import hashlib
import json
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from serving.config import ServingConfig
from serving.galleries.item import Item, item_line, parse_item
from serving.watches.storage import Storage
from serving.watches.watch import WatchError

_PREFIX, _INSERTED, _DELETED = "gallery/", "inserted", "deleted"
# A replica that has missed more changes than this receives all of them again.
_REMEMBERED = 1000


class GalleryChangeError(WatchError):
    """A gallery cannot be changed."""


class UnknownItemError(GalleryChangeError):
    """The gallery does not contain the item."""


class NameInUseError(GalleryChangeError):
    """The gallery already contains an item with this name."""


class GalleryFullError(GalleryChangeError):
    """The gallery has reached its limit of changes."""


@dataclass(frozen=True)
class InsertedItem:
    """An item that was inserted into a served gallery. `features` are little-endian float32."""

    id: str
    name: str
    text: str | None
    features: bytes
    thumbnail: bytes

    def encoded(self) -> bytes:
        header = {"name": self.name, "text": self.text, "features": len(self.features)}
        return json.dumps(header).encode() + b"\n" + self.features + self.thumbnail

    @classmethod
    def decoded(cls, item_id: str, raw: bytes) -> "InsertedItem":
        line, _, rest = raw.partition(b"\n")
        header = json.loads(line)
        size = header["features"]
        return cls(item_id, header["name"], header["text"], rest[:size], rest[size:])


@dataclass(frozen=True)
class GalleryUpdate:
    """The changes of a gallery since a version, or all of them if `is_complete`.

    `epoch` changes when the process that stores them restarts. `inserted` have no thumbnails,
    `removed` are ids of inserted items, and `deleted` are items of the gallery's files.
    """

    epoch: str
    version: int
    is_complete: bool = False
    inserted: tuple[InsertedItem, ...] = ()
    removed: tuple[str, ...] = ()
    deleted: tuple[Item, ...] = ()


class GalleryChanges(Protocol):
    """Stores the changes of all galleries. Every method may raise WatchesDownError.

    `gallery` identifies a gallery and the backbone of its features.
    """

    async def insert_items(self, gallery: str, items: Sequence[InsertedItem]) -> None:
        """Insert all items or none. Raises NameInUseError and GalleryFullError."""
        ...

    async def remove_item(self, gallery: str, item_id: str) -> None:
        """Remove an inserted item. Raises UnknownItemError."""
        ...

    async def delete_item(self, gallery: str, item: Item) -> None:
        """Delete an item of the gallery's files. Raises GalleryFullError."""
        ...

    async def gallery_changes(self, gallery: str, epoch: str, version: int) -> GalleryUpdate:
        """Return the changes since a version."""
        ...

    async def inserted_thumbnail(self, gallery: str, item_id: str) -> bytes:
        """Return the thumbnail of an inserted item. Raises UnknownItemError."""
        ...


class _State:
    """The changes of one gallery."""

    def __init__(self) -> None:
        self.inserted: dict[str, InsertedItem] = {}
        self.deleted: dict[str, Item] = {}
        # The newest changes; the last one has the number `version`.
        self.version = 0
        self.newest: deque[GalleryUpdate] = deque(maxlen=_REMEMBERED)

    def add(self, change: GalleryUpdate) -> None:
        self.inserted |= {item.id: item for item in change.inserted}
        for item_id in change.removed:
            del self.inserted[item_id]
        self.deleted |= {_digest(item): item for item in change.deleted}
        self.version += 1
        plain = tuple(replace(item, thumbnail=b"") for item in change.inserted)
        self.newest.append(replace(change, version=self.version, inserted=plain))

    def since(self, epoch: str, version: int) -> GalleryUpdate:
        missed = [change for change in self.newest if change.version > version]
        if len(missed) == self.version - version:
            present = [item for one in missed for item in one.inserted if item.id in self.inserted]
            return GalleryUpdate(
                epoch,
                self.version,
                inserted=tuple(present),
                removed=tuple(item_id for one in missed for item_id in one.removed),
                deleted=tuple(item for one in missed for item in one.deleted),
            )
        inserted = tuple(replace(item, thumbnail=b"") for item in self.inserted.values())
        return GalleryUpdate(
            epoch,
            self.version,
            is_complete=True,
            inserted=inserted,
            deleted=tuple(self.deleted.values()),
        )


class ChangeLog:
    """`GalleryChanges` in a `Storage`. Use it from a single event loop."""

    def __init__(self, config: ServingConfig, storage: Storage) -> None:
        self.config = config
        self._storage, self._epoch = storage, secrets.token_hex(8)
        self._lock = asyncio.Lock()  # one transaction at a time, so that limits are exact
        self._states: dict[str, _State] = {}
        for key, value in storage.items():
            if key.startswith(_PREFIX):
                gallery, kind, name = key.removeprefix(_PREFIX).split("/")
                state = self._states.setdefault(gallery, _State())
                if kind == _INSERTED:
                    state.inserted[name] = InsertedItem.decoded(name, value)
                else:
                    state.deleted[name] = parse_item(value)

    async def insert_items(self, gallery: str, items: Sequence[InsertedItem]) -> None:
        async with self._lock:
            state = self._state(gallery)
            limit = self.config.max_gallery_inserts
            if len(state.inserted) + len(items) > limit:
                raise GalleryFullError(
                    f"the gallery has reached its limit of {limit} inserted items. Add them to the "
                    "collection and run kway index"
                )
            names = {item.name for item in state.inserted.values()}
            for item in items:
                if item.name in names:
                    raise NameInUseError(f"the gallery already contains an item named {item.name}")
                names.add(item.name)
            written = {_key(gallery, _INSERTED, item.id): item.encoded() for item in items}
            await self._apply(written)
            state.add(GalleryUpdate(self._epoch, 0, inserted=tuple(items)))

    async def remove_item(self, gallery: str, item_id: str) -> None:
        async with self._lock:
            self._inserted(gallery, item_id)
            await self._apply({_key(gallery, _INSERTED, item_id): None})
            self._state(gallery).add(GalleryUpdate(self._epoch, 0, removed=(item_id,)))

    async def delete_item(self, gallery: str, item: Item) -> None:
        async with self._lock:
            state, digest = self._state(gallery), _digest(item)
            limit = self.config.max_gallery_deletions
            if digest not in state.deleted and len(state.deleted) >= limit:
                raise GalleryFullError(
                    f"the gallery has reached its limit of {limit} deleted items. Delete them from "
                    "the collection and run kway index"
                )
            await self._apply({_key(gallery, _DELETED, digest): item_line(item)})
            state.add(GalleryUpdate(self._epoch, 0, deleted=(item,)))

    async def gallery_changes(self, gallery: str, epoch: str, version: int) -> GalleryUpdate:
        # -1: a replica without any changes yet, or with those of another epoch.
        return self._state(gallery).since(self._epoch, version if epoch == self._epoch else -1)

    async def inserted_thumbnail(self, gallery: str, item_id: str) -> bytes:
        return self._inserted(gallery, item_id).thumbnail

    def _state(self, gallery: str) -> _State:
        return self._states.setdefault(gallery, _State())

    def _inserted(self, gallery: str, item_id: str) -> InsertedItem:
        found = self._state(gallery).inserted.get(item_id)
        if found is None:
            raise UnknownItemError(f"the gallery does not contain an item {item_id!r}")
        return found

    async def _apply(self, changes: Mapping[str, bytes | None]) -> None:
        await asyncio.to_thread(self._storage.apply, changes)


def _key(gallery: str, kind: str, name: str) -> str:
    return f"{_PREFIX}{gallery}/{kind}/{name}"


def _digest(item: Item) -> str:
    """Return a key for a version of an item."""
    return hashlib.blake2b(item_line(Item(*item[:3])), digest_size=16).hexdigest()
