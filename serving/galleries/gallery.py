"""Galleries on disk: rows (items with their features and thumbnails), which are written as a stream
and memory-mapped, and open galleries, which add the index and the ids of items."""

import hashlib
import json
import os
import re
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
_HEADER_BYTES = 128
_ID = re.compile(r"(\d{1,18})\.([0-9a-f]{8})")


class Row(NamedTuple):
    """An item with its features, float32 [dim], and its thumbnail, a JPEG or empty bytes. `is_new`:
    it was computed in this run."""

    item: Item
    features: np.ndarray
    thumbnail: bytes
    is_new: bool = False


class Rows:
    """The rows in a folder. Thread-safe. Continues to use its original files if the folder is
    replaced. `features` are float32 [num_items, dim]."""

    def __init__(self, path: Path, num_items: int, dim: int, *, is_complete: bool = True) -> None:
        """`is_complete`: `RowWriter` has written these rows only. Raises ValueError if the features
        or offsets have another shape."""
        self.path, self.num_items = path, num_items
        shapes = (num_items, dim), (num_items + 1, 2)
        self.features = map_matrix(path / FEATURES, "<f4", shapes[0], is_complete=is_complete)
        self._offsets = map_matrix(path / OFFSETS, "<u8", shapes[1], is_complete=is_complete)
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


class RowWriter:
    """Writes rows to a new folder. If the process is killed, the rows of the last `save` remain."""

    def __init__(self, path: Path, dim: int) -> None:
        path.mkdir()
        self.num_rows, self._dim = 0, dim
        self._ends = np.zeros(2, "<u8")
        names = (FEATURES, ITEMS, OFFSETS, THUMBNAILS)
        self._files = [(path / name).open("xb") for name in names]
        self._features, self._lines, self._offsets, self._thumbnails = self._files
        self._features.write(bytes(_HEADER_BYTES))
        self._offsets.write(bytes(_HEADER_BYTES) + self._ends.tobytes())
        self.save()

    def add(self, row: Row) -> None:
        self._features.write(row.features.astype("<f4", copy=False).tobytes())
        self._ends[0] += self._lines.write(item_line(row.item))
        self._ends[1] += self._thumbnails.write(row.thumbnail)
        self._offsets.write(self._ends.tobytes())
        self.num_rows += 1

    def save(self) -> None:
        """Write all rows to the disk, then the header of the offsets, which states their number."""
        self._features.seek(0)
        self._features.write(matrix_header("<f4", (self.num_rows, self._dim)))
        for file in self._files:
            file.seek(0, os.SEEK_END)
            flush(file)
        self._offsets.seek(0)
        self._offsets.write(matrix_header("<u8", (self.num_rows + 1, 2)))
        flush(self._offsets)
        self._offsets.seek(0, os.SEEK_END)

    def close(self) -> None:
        self.save()  # also after an interrupt
        for file in self._files:
            file.close()


def saved_rows(path: Path, dim: int) -> Rows:
    """Open the rows that a `RowWriter` has saved, even if its process was killed."""
    with (path / OFFSETS).open("rb") as file:
        header = file.read(_HEADER_BYTES)[8:]
    num_rows = json.loads(header)["matrix"]["shape"][0] - 1
    return Rows(path, num_rows, dim, is_complete=False)


def matrix_header(kind: Kind, shape: tuple[int, int]) -> bytes:
    """Return the header of a safetensors file with a single matrix. The rows follow the header, so
    that they can be written as a stream. Its length is the same for all shapes."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    entry = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({"matrix": entry}, separators=(",", ":")).encode()
    # A multiple of 64 bytes, which aligns the rows for vector instructions.
    return (_HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(_HEADER_BYTES - 8)


def map_matrix(
    path: Path, kind: Kind, shape: tuple[int, int], *, is_complete: bool = True
) -> np.ndarray:
    """Memory-map a matrix read-only. All processes on the machine share the memory. Raises
    ValueError if the file does not contain this matrix, or, if it is not complete, fewer rows."""
    data, size = _mapped(path), shape[0] * shape[1] * np.dtype(kind).itemsize
    end = _HEADER_BYTES + size
    is_other = data[:_HEADER_BYTES].tobytes() != matrix_header(kind, shape) or len(data) != end
    if len(data) < end or (is_complete and is_other):
        raise ValueError(
            f"{path} does not contain a matrix of type {_DTYPES[kind]} and shape {list(shape)}: "
            f"{DAMAGE_REMEDY}"
        )
    return data[_HEADER_BYTES:end].view(kind).reshape(shape)


def _mapped(path: Path) -> np.ndarray:
    """Map the bytes of a file, which may be empty."""
    with path.open("rb") as file:
        is_empty = os.fstat(file.fileno()).st_size == 0
        return np.empty(0, np.uint8) if is_empty else mapped(file)
