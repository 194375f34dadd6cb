"""An opened gallery: the features of a collection, mapped; its items and thumbnails by index."""

import hashlib
import os
import weakref
from pathlib import Path

from serving.galleries.items import Item, parse_item
from serving.galleries.manifest import (
    AGAIN,
    FEATURES,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    check_same_backbone,
    read_info,
)
from serving.galleries.matrix import map_matrix
from trainer.bundle.bundle import Bundle


class Gallery:
    """Read by any number of threads. A folder that is replaced meanwhile stays as it was opened."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError where the gallery, or a file of it, is missing, and ValueError
        where it is damaged, of a newer format, or holds features of another backbone."""
        self.path, self.info = path, read_info(path)
        check_same_backbone(path, self.info, bundle)
        self.num_items = self.info.num_items
        self.features = map_matrix(path / FEATURES, "<f4", (self.num_items, self.info.dim))
        self._ends = map_matrix(path / OFFSETS, "<u8", (self.num_items + 1, 2))
        self._lines, self._thumbnails = (self._open(name) for name in (ITEMS, THUMBNAILS))

    def verify(self) -> None:
        """Read every file and compare its checksum; ValueError names the first that differs."""
        for name, expected in self.info.files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise ValueError(f"{self.path / name} does not match its checksum: {AGAIN}")

    def item(self, index: int) -> Item:
        """Raises IndexError for an index outside the gallery."""
        return parse_item(self._read(ITEMS, self._lines, index, 0))

    def thumbnail(self, index: int) -> bytes:
        """A JPEG; nothing where the gallery has none. Raises IndexError as `item` does."""
        return self._read(THUMBNAILS, self._thumbnails, index, 1)

    def _open(self, name: str) -> int:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _read(self, name: str, descriptor: int, index: int, column: int) -> bytes:
        if not 0 <= index < self.num_items:
            raise IndexError(f"item {index} is not within 0 … {self.num_items - 1}")
        begin, end = (int(place) for place in self._ends[index : index + 2, column])
        if not begin <= end <= self.info.files[name].bytes:
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {AGAIN}")
        return os.pread(descriptor, end - begin, begin)
