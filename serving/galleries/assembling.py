"""Assemble the rows of several parts, of one or more runs, into one gallery in listing order.

The listing and all parts are sorted in the same order, so they are merged in a single pass. Only
the next item of each part is held in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from data.files import commit
from serving.galleries.format import (
    DATA_FILES,
    FEATURES,
    GALLERY,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    UNREADABLE,
    GalleryInfo,
    Item,
    item_line,
    order_of,
    read_items,
)
from serving.galleries.rows import HashedFile, RowReader, matrix_header
from serving.galleries.work_folder import About, WorkFolder


class IndexedItem(NamedTuple):
    """Where the features of an item are stored."""

    rows: RowReader
    position: int
    item: Item  # as indexed, including its text


class _Part:
    """Iterates over one part in order, as far as needed."""

    def __init__(self, rows: RowReader, order: Callable[[str], Any]) -> None:
        self._rows, self._order, self._left = rows, order, iter(rows)
        self._next()

    def find(self, key: Any, item: Item) -> IndexedItem | None:
        while self._position >= 0 and self._key < key:
            self._next()
        same = self._position >= 0 and self._key == key and self._item[1:3] == item[1:3]
        return IndexedItem(self._rows, self._position, self._item) if same else None

    def _next(self) -> None:
        following = next(self._left, None)
        if following is None:
            self._position = -1
            return
        self._position, self._item = following
        self._key = self._order(self._item.name)


def matched_items(
    items: Iterable[Item], indexed: Sequence[RowReader], order: Callable[[str], Any]
) -> Iterator[tuple[Item, IndexedItem | None]]:
    """Each of `items` with the location where it was indexed, if it is unchanged since; None
    otherwise. Items and rows must be sorted by `order` of their names."""
    parts = [_Part(rows, order) for rows in indexed]
    for item in items:
        key = order(item.name)
        # Search every part, even if an earlier one has the item: all of them must advance to this
        # key.
        found = [one for one in [part.find(key, item) for part in parts] if one is not None]
        yield item, found[0] if found else None


_REPORT_EVERY = 1000


def assemble(
    work: WorkFolder,
    about: About,
    rows: Sequence[RowReader],
    num_items: int,
    unreadable: int,
    report: Callable[[int, int], None],
) -> GalleryInfo:
    """Write the gallery with the `num_items` items of the listing that `rows` contain."""
    work.finished.mkdir()
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(HashedFile(work.finished / name)) for name in DATA_FILES
        }
        gallery = _GalleryWriter(files, num_items, about.dim)
        for item, found in matched_items(read_items(work.listing), rows, order_of(about.reads)):
            if found is not None:  # otherwise it could not be read
                gallery.append(item_line(item._replace(text=found.item.text)), found)
                if gallery.count % _REPORT_EVERY == 0 or gallery.count == num_items:
                    report(gallery.count, num_items)
        assert gallery.count == num_items
        with work.unreadable.open("rb") as listed:
            while data := listed.read(1 << 20):
                files[UNREADABLE].write(data)
    described = {name: file.info() for name, file in files.items()}
    info = GalleryInfo(
        **about.model_dump(), num_items=num_items, unreadable=unreadable, files=described
    )
    commit(work.finished / GALLERY, info.model_dump_json(indent=1).encode() + b"\n")
    return info


class _GalleryWriter:
    """Appends items to the files of a gallery."""

    def __init__(self, files: dict[str, HashedFile], num_items: int, dim: int) -> None:
        self._files, self.count = files, 0
        files[FEATURES].write(matrix_header("<f4", (num_items, dim)))
        files[OFFSETS].write(matrix_header("<u8", (num_items + 1, 2)))
        self._write_ends()

    def append(self, line: bytes, found: IndexedItem) -> None:
        self._files[ITEMS].write(line)
        self._files[FEATURES].write(found.rows.features(found.position))
        self._files[THUMBNAILS].write(found.rows.thumbnail(found.position))
        self._write_ends()
        self.count += 1

    def _write_ends(self) -> None:
        ends = (self._files[ITEMS].size, self._files[THUMBNAILS].size)
        self._files[OFFSETS].write(np.array(ends, "<u8").tobytes())
