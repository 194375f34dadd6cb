"""Open galleries: their items, features and thumbnails.

Features are memory-mapped; items and thumbnails are read by index.
"""

import hashlib
import os
import re
import weakref
from functools import cached_property
from pathlib import Path

import numpy as np

from heads.logits import inverse_norms_of
from serving.galleries.format import (
    DAMAGE_REMEDY,
    FEATURES,
    INDEX,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    Item,
    check_same_backbone,
    map_matrix,
    parse_item,
    read_info,
)
from serving.galleries.index import ApproximateIndex
from trainer.bundle.bundle import Bundle

_ID = re.compile(r"(\d{1,18})\.([0-9a-f]{8})")


class Gallery:
    """An open gallery. Thread-safe. It continues to use its original files if the folder is
    replaced."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if
        it is damaged, has a newer format or contains features from a different backbone."""
        self.path, self.info = path, read_info(path)
        check_same_backbone(path, self.info, bundle)
        self.num_items = self.info.num_items
        self.features = map_matrix(path / FEATURES, "<f4", (self.num_items, self.info.dim))
        self._ends = map_matrix(path / OFFSETS, "<u8", (self.num_items + 1, 2))
        self._lines, self._thumbnails = (self._open(name) for name in (ITEMS, THUMBNAILS))
        self.index: ApproximateIndex | None = None
        if self.info.index is not None:
            shape = (self.num_items, self.info.dim)
            self.index = ApproximateIndex(path / INDEX, self.info.index, shape)

    def verify(self) -> None:
        """Verify the checksums of all files. Raises ValueError at the first mismatch."""
        for name, expected in self.info.files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                    raise ValueError(
                        f"{self.path / name} does not match its checksum: {DAMAGE_REMEDY}"
                    )

    def item(self, index: int) -> Item:
        """Return an item. Raises IndexError if the index is out of range."""
        return parse_item(self._read(ITEMS, self._lines, index, 0))

    @cached_property
    def inverse_norms(self) -> np.ndarray:
        """The inverse norms of the features, float32 [num_items], which cosines are multiplied
        by."""
        return inverse_norms_of(self.features)

    def id_of(self, index: int) -> str:
        """Return the id of an item, which contains a hash of its name. If the gallery is built
        again, an id that belongs to another item is not valid any more."""
        return f"{index}.{_fingerprint(self.item(index))}"

    def index_of_id(self, item_id: str) -> int | None:
        """Return the index of the item with this id, or None if there is no such item."""
        parts = _ID.fullmatch(item_id)
        if parts is None or int(parts[1]) >= self.num_items:
            return None
        index = int(parts[1])
        return index if _fingerprint(self.item(index)) == parts[2] else None

    def thumbnail(self, index: int) -> bytes:
        """Return the item's thumbnail as a JPEG, or empty bytes if the gallery has no thumbnails.
        Raises IndexError like `item`."""
        return self._read(THUMBNAILS, self._thumbnails, index, 1)

    def _open(self, name: str) -> int:
        descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _read(self, name: str, descriptor: int, index: int, column: int) -> bytes:
        if not 0 <= index < self.num_items:
            raise IndexError(
                f"item {index} is out of range: the gallery contains items 0 to "
                f"{self.num_items - 1}"
            )
        begin, end = (int(offset) for offset in self._ends[index : index + 2, column])
        if not begin <= end <= self.info.files[name].bytes:
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {DAMAGE_REMEDY}")
        return os.pread(descriptor, end - begin, begin)


def _fingerprint(item: Item) -> str:
    return hashlib.blake2b(os.fsencode(item.name), digest_size=4).hexdigest()
