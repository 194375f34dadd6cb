"""`HitLog`: the newest hits of every watch, numbered and stored until a limit is exceeded.

The hits of a watch have the cursors 1, 2, 3, … in the order in which they are stored. A reader that
remembers the cursor of its last hit can continue after it, even after a restart.

All hits that arrive while a transaction is being written share the next one, so the number of
frames per second does not depend on the time that the disk takes for a transaction.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from serving.config import ServingConfig
from serving.watches.storage import Storage
from serving.watches.watch import HitBatch, WatchesDownError

_HIT, _LAST = "hit/", "last/"


class _Stored(NamedTuple):
    """A hit. `number` counts the hits of all watches; `line` is JSON and contains the cursor."""

    number: int
    cursor: int
    line: str

    def key(self, watch_id: str) -> str:
        return f"{_HIT}{self.number:016d}/{watch_id}/{self.cursor}"


class _Pending(NamedTuple):
    """Hits and other changes that wait for the next transaction."""

    hits: Sequence[tuple[str, str]]
    changes: Mapping[str, bytes | None]
    cursors: asyncio.Future[list[int | None]]


class HitLog:
    """Stores hits of `watches` within the limits of `config`. `on_stored` is called with the ids of
    the watches that have new hits. Use it from a single event loop."""

    def __init__(
        self,
        config: ServingConfig,
        storage: Storage,
        *,
        watches: Container[str],
        on_stored: Callable[[Iterable[str]], None],
    ) -> None:
        self.config = config
        self._storage, self._watches, self._on_stored = storage, watches, on_stored
        self._hits: dict[str, deque[_Stored]] = {}
        self._order: OrderedDict[int, str] = OrderedDict()  # from number to watch, oldest first
        self._assigned: dict[str, int] = {}  # the newest cursor, perhaps not written yet
        self._dropped_to: dict[str, int] = {}  # the cursor of the newest hit that was dropped
        self._number = 0
        self._pending: list[_Pending] = []
        self._changes: dict[str, bytes | None] = {}  # written with the next transaction
        self._task: asyncio.Task[None] | None = None
        self._load()

    def last(self, watch_id: str) -> int:
        """Return the cursor of the newest stored hit of a watch; 0 if it never had one."""
        hits = self._hits.get(watch_id)
        return hits[-1].cursor if hits else self._dropped_to.get(watch_id, 0)

    def after(self, watch_id: str, cursor: int, *, most: int) -> tuple[HitBatch, int]:
        """Return up to `most` hits after `cursor`, and the cursor of the last of them."""
        found = [hit for hit in self._hits.get(watch_id, ()) if hit.cursor > cursor][:most]
        dropped = max(0, self._dropped_to.get(watch_id, 0) - cursor)
        batch = HitBatch(tuple(hit.line for hit in found), dropped, ended=None)
        return batch, found[-1].cursor if found else cursor + dropped

    async def append(
        self, hits: Sequence[tuple[str, str]], changes: Mapping[str, bytes | None]
    ) -> list[int | None]:
        """Store hits, as pairs (watch id, line of JSON), and other changes in one transaction, and
        return the cursors. The cursor is None if the watch does not exist any more.

        Raises WatchesDownError if the storage cannot be written.
        """
        pending = _Pending(hits, changes, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._start()
        return await pending.cursors

    def remove(self, watch_id: str) -> None:
        """Delete the hits of a watch that has ended, from the storage with the next transaction."""
        for hit in self._hits.pop(watch_id, ()):
            del self._order[hit.number]
            self._changes[hit.key(watch_id)] = None
        if self._assigned.pop(watch_id, None) is not None:
            self._changes[_LAST + watch_id] = None
        self._dropped_to.pop(watch_id, None)

    def delete(self, changes: Mapping[str, bytes | None]) -> None:
        """Delete other entries of the storage with the next transaction."""
        self._changes |= changes

    def flush(self) -> None:
        """Start a transaction for the hits that have been deleted."""
        pending = _Pending((), {}, asyncio.get_running_loop().create_future())
        pending.cursors.add_done_callback(asyncio.Future.exception)  # the next one tries again
        self._pending.append(pending)
        self._start()

    def _load(self) -> None:
        """Read the stored hits, delete those of watches that have ended, and apply the limits."""
        for key, value in self._storage.items():
            if key.startswith(_HIT):
                number, watch_id, cursor = key.removeprefix(_HIT).split("/")
                hit = _Stored(int(number), int(cursor), value.decode())
                self._dropped_to.setdefault(watch_id, hit.cursor - 1)
                self._keep(watch_id, hit)
                self._assigned[watch_id], self._number = hit.cursor, hit.number
            elif key.startswith(_LAST):  # after all hits in the order of the keys
                watch_id, last = key.removeprefix(_LAST), int(value)
                self._assigned[watch_id] = max(last, self._assigned.get(watch_id, 0))
                self._dropped_to.setdefault(watch_id, last)
        for watch_id in [one for one in self._assigned if one not in self._watches]:
            self.remove(watch_id)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            kept, self._changes = self._changes, {}
            stored = [self._numbered(pending.hits) for pending in batch]
            changes = kept | {
                hit.key(watch_id): hit.line.encode()
                for hits in stored
                for watch_id, hit in hits
                if hit is not None
            }
            for pending in batch:
                changes |= pending.changes
            try:
                await asyncio.to_thread(self._storage.apply, changes)
            except WatchesDownError as error:
                self._changes = kept | self._changes
                for pending in batch:
                    if not pending.cursors.done():
                        pending.cursors.set_exception(WatchesDownError(str(error)))
            else:
                self._publish(batch, stored)

    def _numbered(self, hits: Sequence[tuple[str, str]]) -> list[tuple[str, _Stored | None]]:
        """Assign numbers and cursors, which are not used again even if the transaction fails."""
        found: list[tuple[str, _Stored | None]] = []
        for watch_id, line in hits:
            if watch_id not in self._watches:
                found.append((watch_id, None))
                continue
            self._number += 1
            cursor = self._assigned[watch_id] = self._assigned.get(watch_id, 0) + 1
            line = f'{line[:-1]},"cursor":{cursor}}}'
            found.append((watch_id, _Stored(self._number, cursor, line)))
        return found

    def _publish(
        self, batch: Sequence[_Pending], stored: Sequence[list[tuple[str, _Stored | None]]]
    ) -> None:
        """Make the hits of a completed transaction visible."""
        changed = dict[str, None]()
        for pending, hits in zip(batch, stored, strict=True):
            for watch_id, hit in hits:
                if hit is None:
                    continue
                if watch_id in self._watches:
                    self._keep(watch_id, hit)
                    changed[watch_id] = None
                else:  # it has ended during the transaction
                    self._changes[hit.key(watch_id)] = None
            if not pending.cursors.done():
                pending.cursors.set_result([hit and hit.cursor for _, hit in hits])
        self._on_stored(changed)

    def _keep(self, watch_id: str, hit: _Stored) -> None:
        """Add a hit, and drop the oldest ones beyond the limits."""
        self._hits.setdefault(watch_id, deque()).append(hit)
        self._order[hit.number] = watch_id
        if len(self._hits[watch_id]) > self.config.max_watch_hits:
            self._drop(watch_id)
        while len(self._order) > self.config.max_hits:
            self._drop(next(iter(self._order.values())))

    def _drop(self, watch_id: str) -> None:
        """Drop the oldest hit of a watch. If no hit is left, store its cursor, so that it is not
        used again."""
        hits = self._hits[watch_id]
        hit = hits.popleft()
        del self._order[hit.number]
        self._dropped_to[watch_id] = hit.cursor
        self._changes[hit.key(watch_id)] = None
        if not hits:
            del self._hits[watch_id]
            self._changes[_LAST + watch_id] = str(hit.cursor).encode()
