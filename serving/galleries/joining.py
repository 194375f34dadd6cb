"""Items that are listed, and those that were indexed before, in one pass over both in order.

Nothing is held but the next item of each part, however many there are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from serving.galleries.items import Item
from serving.galleries.rows import RowReader


class Found(NamedTuple):
    """Where the features of an item lie."""

    rows: RowReader
    position: int
    item: Item  # as it was indexed, with what is shown of it


class _Part:
    """Goes through one part in order, as far as it is asked about."""

    def __init__(self, rows: RowReader, order: Callable[[str], Any]) -> None:
        self._rows, self._order, self._left = rows, order, iter(rows)
        self._next()

    def find(self, key: Any, item: Item) -> Found | None:
        while self._position >= 0 and self._key < key:
            self._next()
        same = self._position >= 0 and self._key == key and self._item[1:3] == item[1:3]
        return Found(self._rows, self._position, self._item) if same else None

    def _next(self) -> None:
        following = next(self._left, None)
        if following is None:
            self._position = -1
            return
        self._position, self._item = following
        self._key = self._order(self._item.name)


def joined(
    items: Iterable[Item], indexed: Sequence[RowReader], order: Callable[[str], Any]
) -> Iterator[tuple[Item, Found | None]]:
    """Each of `items` with where the same item, unchanged, was indexed; all in `order` of names."""
    parts = [_Part(rows, order) for rows in indexed]
    for item in items:
        key = order(item.name)
        # All parts move on, so none may be left out where another has the item.
        found = [one for one in [part.find(key, item) for part in parts] if one is not None]
        yield item, found[0] if found else None
