"""Galleries on disk: rows (items with their features and thumbnails), which are written as a stream
and memory-mapped, and open galleries, which add the index and the ids of items."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data.files import flush, mapped, sha256_of
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
    item_line,
    parse_item,
    read_info,
)
from serving.galleries.index import ApproximateIndex
from trainer.bundle.bundle import Bundle

Kind = Literal["<f4", "<u8"]
_DTYPES = {"<f4": "F32", "<u8": "U64"}
_ID = re.compile(r"(\d{1,18})\.([0-9a-f]{8})")


class Row(NamedTuple):
    """An item with its features, float32 [dim], and its thumbnail, a JPEG or empty bytes."""

    item: Item
    features: np.ndarray
    thumbnail: bytes


class Rows:
    """The rows in a folder. Thread-safe. Continues to use its original files if the folder is
    replaced. `features` are float32 [num_items, dim]."""

    def __init__(self, path: Path, num_items: int, dim: int) -> None:
        """Raises ValueError if the features or offsets have another shape."""
        self.path, self.num_items = path, num_items
        self.features = map_matrix(path / FEATURES, "<f4", (num_items, dim))
        self._offsets = map_matrix(path / OFFSETS, "<u8", (num_items + 1, 2))
        self._lines, self._thumbnails = (_mapped(path / name) for name in (ITEMS, THUMBNAILS))

    def item(self, index: int) -> Item:
        """Return an item. Raises IndexError if the index is out of range."""
        return parse_item(self._read(self._lines, index, 0))

    def thumbnail(self, index: int) -> bytes:
        """Return the item's thumbnail as a JPEG, or empty bytes if there are no thumbnails. Raises
        IndexError like `item`."""
        return self._read(self._thumbnails, index, 1)

    def _read(self, data: np.ndarray, index: int, column: int) -> bytes:
        if not 0 <= index < self.num_items:
            raise IndexError(
                f"item {index} is out of range: the gallery contains items 0 to "
                f"{self.num_items - 1}"
            )
        begin, end = self._offsets[index : index + 2, column].tolist()
        if not begin <= end <= len(data):
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {DAMAGE_REMEDY}")
        return data[begin:end].tobytes()


class Gallery(Rows):
    """An open gallery. Thread-safe. It continues to use its original files if the folder is
    replaced."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if
        it is damaged, has a newer format or contains features from a different backbone."""
        self.info = read_info(path)
        check_same_backbone(path, self.info, bundle)
        super().__init__(path, self.info.num_items, self.info.dim)
        self.index: ApproximateIndex | None = None
        if self.info.index is not None:
            self.index = ApproximateIndex(
                path / INDEX, self.features.shape, num_probes=self.info.index.num_probes
            )

    def verify(self) -> None:
        """Verify the checksums of all files. Raises ValueError at the first mismatch."""
        for name, expected in self.info.files.items():
            if sha256_of(self.path / name) != expected.sha256:
                raise ValueError(f"{self.path / name} does not match its checksum: {DAMAGE_REMEDY}")

    @cached_property
    def inverse_norms(self) -> np.ndarray:
        """The inverse norms of the features, float32 [num_items], which cosines are multiplied
        by."""
        return inverse_norms_of(self.features)

    def id_of(self, index: int) -> str:
        """Return the id of an item, which contains a hash of its name. If the gallery is built
        again, an id that belongs to another item is not valid any more."""
        name = os.fsencode(self.item(index).name)
        return f"{index}.{hashlib.blake2b(name, digest_size=4).hexdigest()}"

    def index_of_id(self, item_id: str) -> int | None:
        """Return the index of the item with this id, or None if there is no such item."""
        parts = _ID.fullmatch(item_id)
        if parts is None or int(parts[1]) >= self.num_items:
            return None
        index = int(parts[1])
        return index if self.id_of(index).endswith(f".{parts[2]}") else None


def write_rows(path: Path, rows: Iterable[Row], num_items: int, dim: int) -> None:
    """Write `num_items` rows to a new folder as a stream, and sync the files to disk."""
    path.mkdir()
    with ExitStack() as opened:
        files = [
            opened.enter_context((path / name).open("xb"))
            for name in (FEATURES, ITEMS, OFFSETS, THUMBNAILS)
        ]
        features, lines, offsets, thumbnails = files
        features.write(matrix_header("<f4", (num_items, dim)))
        offsets.write(matrix_header("<u8", (num_items + 1, 2)))
        ends = np.zeros(2, "<u8")
        offsets.write(ends.tobytes())
        for row in rows:
            features.write(row.features.astype("<f4", copy=False).tobytes())
            ends[0] += lines.write(item_line(row.item))
            ends[1] += thumbnails.write(row.thumbnail)
            offsets.write(ends.tobytes())
        for file in files:
            flush(file)


def matrix_header(kind: Kind, shape: tuple[int, int]) -> bytes:
    """Return the header of a safetensors file with a single matrix. The rows follow the header, so
    that they can be written as a stream."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    entry = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({"matrix": entry}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % 64)  # align the rows to 64 bytes for vector instructions
    return len(header).to_bytes(8, "little") + header


def map_matrix(path: Path, kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """Memory-map a matrix read-only. All processes on the machine share the memory. Raises
    ValueError if the file does not contain this matrix."""
    header, data = matrix_header(kind, shape), _mapped(path)
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    if data[: len(header)].tobytes() != header or len(data) != len(header) + size:
        raise ValueError(
            f"{path} does not contain a matrix of type {_DTYPES[kind]} and shape {list(shape)}: "
            f"{DAMAGE_REMEDY}"
        )
    return data[len(header) :].view(kind).reshape(shape)


def _mapped(path: Path) -> np.ndarray:
    """Map the bytes of a file, which may be empty."""
    with path.open("rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, np.uint8) if is_empty else mapped(file)
