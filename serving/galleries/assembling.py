"""The rows of several parts, of one or more runs, become one gallery in its listing's order."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from data.aside import commit
from serving.galleries.items import item_line, order_of, read_items
from serving.galleries.joining import Found, joined
from serving.galleries.manifest import (
    DATA_FILES,
    FEATURES,
    GALLERY,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    UNREADABLE,
    GalleryInfo,
)
from serving.galleries.matrix import HashedFile, matrix_header
from serving.galleries.rows import RowReader
from serving.galleries.workplace import About, Workplace

_REPORT_EVERY = 1000


def assemble(
    work: Workplace,
    about: About,
    rows: Sequence[RowReader],
    num_items: int,
    unreadable: int,
    report: Callable[[int, int], None],
) -> GalleryInfo:
    """Write the gallery of the `num_items` items of the listing that `rows` hold."""
    work.finished.mkdir()
    with ExitStack() as opened:
        files = {
            name: opened.enter_context(HashedFile(work.finished / name)) for name in DATA_FILES
        }
        gallery = _GalleryWriter(files, num_items, about.dim)
        for item, found in joined(read_items(work.listing), rows, order_of(about.reads)):
            if found is not None:  # else it could not be read
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

    def append(self, line: bytes, found: Found) -> None:
        self._files[ITEMS].write(line)
        self._files[FEATURES].write(found.rows.features(found.position))
        self._files[THUMBNAILS].write(found.rows.thumbnail(found.position))
        self._write_ends()
        self.count += 1

    def _write_ends(self) -> None:
        ends = (self._files[ITEMS].size, self._files[THUMBNAILS].size)
        self._files[OFFSETS].write(np.array(ends, "<u8").tobytes())
