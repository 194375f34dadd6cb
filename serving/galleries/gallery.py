"""Galleries on disk: rows (items with their features and thumbnails), which are written as a stream
and memory-mapped."""

import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data.files import mapped, sha256_of
from heads.logits import inverse_norms_of
from serving.galleries.format import (
    DAMAGE_REMEDY,
    FEATURES,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    Item,
    check_same_backbone,
    item_line,
    parse_item,
    read_info,
)
from trainer.bundle.bundle import Bundle

Kind = Literal["<f4", "<u8"]
_DTYPES = {"<f4": "F32", "<u8": "U64"}
_HEADER_BYTES = 128
_ID = re.compile(r"(\d{1,18})\.([0-9a-f]{8})")


class Row(NamedTuple):
    """An item with its features, float32 [dim], and its thumbnail, a JPEG or empty bytes."""

    item: Item
    features: np.ndarray
    thumbnail: bytes


class Gallery:
    """An open gallery. Thread-safe. It continues to use its original files if the folder is
    replaced. `features` are float32 [num_items, dim]."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        """Raises FileNotFoundError if the gallery or one of its files is missing, and ValueError if
        it is damaged, has a newer format or contains features from a different backbone."""
        self.info = read_info(path)
        check_same_backbone(path, self.info, bundle)
        self.path, self.num_items = path, self.info.num_items
        shapes = (self.num_items, self.info.dim), (self.num_items + 1, 2)
        self.features = map_matrix(path / FEATURES, "<f4", shapes[0])
        self._offsets = map_matrix(path / OFFSETS, "<u8", shapes[1])
        self._lines, self._thumbnails = (_mapped(path / name) for name in (ITEMS, THUMBNAILS))

    def verify(self) -> None:
        """Verify the checksums of all files. Raises ValueError at the first mismatch."""
        for name, expected in self.info.files.items():
            if sha256_of(self.path / name) != expected.sha256:
                raise ValueError(f"{self.path / name} does not match its checksum: {DAMAGE_REMEDY}")

    def item(self, index: int) -> Item:
        return parse_item(self._read(self._lines, index, 0))

    def thumbnail(self, index: int) -> bytes:
        """Return the item's thumbnail as a JPEG, or empty bytes if there are no thumbnails."""
        return self._read(self._thumbnails, index, 1)

    def _read(self, data: np.ndarray, index: int, column: int) -> bytes:
        assert 0 <= index < self.num_items, index
        begin, end = self._offsets[index : index + 2, column].tolist()
        if not begin <= end <= len(data):
            raise ValueError(f"{self.path / OFFSETS} is damaged at item {index}: {DAMAGE_REMEDY}")
        return data[begin:end].tobytes()

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


class RowWriter:
    """Writes the rows of a gallery to a folder. Memory use does not depend on their number."""

    def __init__(self, path: Path, dim: int) -> None:
        self.num_rows, self._dim = 0, dim
        self._ends = np.zeros(2, "<u8")
        names = (FEATURES, ITEMS, OFFSETS, THUMBNAILS)
        self._files = [(path / name).open("xb") for name in names]
        self._features, self._lines, self._offsets, self._thumbnails = self._files
        self._features.write(bytes(_HEADER_BYTES))
        self._offsets.write(bytes(_HEADER_BYTES) + self._ends.tobytes())

    def add(self, row: Row) -> None:
        self._features.write(row.features.astype("<f4", copy=False).tobytes())
        self._ends[0] += self._lines.write(item_line(row.item))
        self._ends[1] += self._thumbnails.write(row.thumbnail)
        self._offsets.write(self._ends.tobytes())
        self.num_rows += 1

    def close(self) -> None:
        """Write the headers, which state the number of rows."""
        self._features.seek(0)
        self._features.write(matrix_header("<f4", (self.num_rows, self._dim)))
        self._offsets.seek(0)
        self._offsets.write(matrix_header("<u8", (self.num_rows + 1, 2)))
        for file in self._files:
            file.close()


def matrix_header(kind: Kind, shape: tuple[int, int]) -> bytes:
    """Return the header of a safetensors file with a single matrix. The rows follow the header, so
    that they can be written as a stream. Its length is the same for all shapes."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    entry = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({"matrix": entry}, separators=(",", ":")).encode()
    # A multiple of 64 bytes, which aligns the rows for vector instructions.
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(_HEADER_BYTES - 8)


def map_matrix(path: Path, kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """Memory-map a matrix read-only. All processes on the machine share the memory. Raises
    ValueError if the file does not contain this matrix."""
    data, size = _mapped(path), shape[0] * shape[1] * np.dtype(kind).itemsize
    header = matrix_header(kind, shape)
    if data[:_HEADER_BYTES].tobytes() != header or len(data) != _HEADER_BYTES + size:
        raise ValueError(
            f"{path} does not contain a matrix of type {_DTYPES[kind]} and shape {list(shape)}: "
            f"{DAMAGE_REMEDY}"
        )
    return data[_HEADER_BYTES:].view(kind).reshape(shape)


def _mapped(path: Path) -> np.ndarray:
    """Map the bytes of a file, which may be empty."""
    with path.open("rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, np.uint8) if is_empty else mapped(file)
