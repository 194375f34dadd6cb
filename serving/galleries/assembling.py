"""Merge the parts computed by one or more runs into a gallery.

The listing and all parts are sorted in the same order, so a single pass merges them. Only the next
item of each part is in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.files import commit
from serving.galleries.format import (
    DATA_FILES,
    FEATURES,
    GALLERY,
    INDEX,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    UNREADABLE,
    GalleryInfo,
    IndexInfo,
    Item,
    item_line,
    map_matrix,
    matrix_header,
    order_of,
    read_items,
)
from serving.galleries.rows import HashedFile, RowReader, flushed_info
from serving.galleries.work_folder import GallerySettings, WorkFolder


class IndexedItem(NamedTuple):
    """The location of an item's features."""

    rows: RowReader
    position: int
    item: Item  # as indexed, including its text


class _Part:
    """Iterates over one part in order, only as far as needed."""

    def __init__(self, rows: RowReader, order: Callable[[str], Any]) -> None:
        self._rows, self._order, self._remaining = rows, order, iter(rows)
        self._next()

    def find(self, key: Any, item: Item) -> IndexedItem | None:
        """Advance to `key`. Return the item's row if the part contains this version of the item."""
        while self._position >= 0 and self._key < key:
            self._next()
        is_same = self._position >= 0 and self._key == key and self._item[1:3] == item[1:3]
        return IndexedItem(self._rows, self._position, self._item) if is_same else None

    def _next(self) -> None:
        entry = next(self._remaining, None)
        if entry is None:
            self._position = -1
            return
        self._position, self._item = entry
        self._key = self._order(self._item.name)


def matched_items(
    items: Iterable[Item], indexed: Sequence[RowReader], order: Callable[[str], Any]
) -> Iterator[tuple[Item, IndexedItem | None]]:
    """Yield each item with its row, or with None if no part contains this version of the item.
    Items and rows must be sorted by `order` of their names."""
    parts = [_Part(rows, order) for rows in indexed]
    for item in items:
        key = order(item.name)
        # Search every part, even if an earlier one contains the item, because all of them must
        # advance to this key.
        matches = [one for one in [part.find(key, item) for part in parts] if one is not None]
        yield item, matches[0] if matches else None


_REPORT_EVERY = 1000


def assemble(
    work: WorkFolder,
    settings: GallerySettings,
    rows: Sequence[RowReader],
    num_items: int,
    unreadable: int,
    report: Callable[[int, int], None],
    build_index: Callable[[np.ndarray, Path], IndexInfo] | None = None,
) -> GalleryInfo:
    """Write the gallery. It contains the items of the listing that are in `rows`, `num_items` in
    total. `build_index` writes the index of the features [num_items, dim] to a file."""
    work.finished.mkdir()
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(HashedFile(work.finished / name)) for name in DATA_FILES
        }
        gallery = _GalleryWriter(files, num_items, settings.dim)
        for item, indexed in matched_items(
            read_items(work.listing), rows, order_of(settings.reads)
        ):
            if indexed is not None:  # None: the item is unreadable
                gallery.append(item_line(item._replace(text=indexed.item.text)), indexed)
                if gallery.count % _REPORT_EVERY == 0 or gallery.count == num_items:
                    report(gallery.count, num_items)
        assert gallery.count == num_items
        with work.unreadable.open("rb") as source:
            while data := source.read(1 << 20):
                files[UNREADABLE].write(data)
    infos = {name: file.info() for name, file in files.items()}
    index = None
    if build_index is not None:
        shape = (num_items, settings.dim)
        file = work.finished / INDEX
        index = build_index(map_matrix(work.finished / FEATURES, "<f4", shape), file)
        infos[INDEX] = flushed_info(file)
    info = GalleryInfo(
        **settings.model_dump(),
        format_version=1 if index is None else 2,  # earlier versions can read format 1
        num_items=num_items,
        unreadable=unreadable,
        index=index,
        files=infos,
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

    def append(self, line: bytes, indexed: IndexedItem) -> None:
        self._files[ITEMS].write(line)
        self._files[FEATURES].write(indexed.rows.features(indexed.position))
        self._files[THUMBNAILS].write(indexed.rows.thumbnail(indexed.position))
        self._write_ends()
        self.count += 1

    def _write_ends(self) -> None:
        ends = (self._files[ITEMS].size, self._files[THUMBNAILS].size)
        self._files[OFFSETS].write(np.array(ends, "<u8").tobytes())
