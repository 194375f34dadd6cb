"""Indexed items on disk, with one file each for lines, features, offsets and thumbnails.

Finished galleries and parts of unfinished ones are read in the same way. They differ only in the
features and offsets: in a gallery, these files have headers, which make each of them a safetensors
file with a single matrix. Such a file can be written as a stream.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from data.files import commit, flush
from serving.galleries.format import (
    FEATURES,
    GALLERY,
    ITEMS,
    OFFSETS,
    THUMBNAILS,
    FileInfo,
    Item,
    item_line,
    matrix_start,
    parse_item,
    read_info,
)

_NAMES = (ITEMS, FEATURES, OFFSETS, THUMBNAILS)
# Contains the number of durable items. A part without this file has none.
COMMITTED = "committed"
_PAIR = 16  # bytes per pair of offsets: into the lines and into the thumbnails


class HashedFile:
    """Writes a new file and computes its SHA-256. Syncs it to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sha256, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.size += len(data)

    def info(self) -> FileInfo:
        return FileInfo(bytes=self.size, sha256=self._sha256.hexdigest())

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                flush(self._file)
        finally:
            self._file.close()


def flushed_info(path: Path) -> FileInfo:
    """Sync a file that a library has written to disk, and return its size and SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileInfo(bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


class RowReader:
    """Reads items in order, with their features and thumbnails as bytes, without a memory map."""

    def __init__(self, path: Path, *, dim: int) -> None:
        """Open a gallery, or a part written by `RowWriter`. Raises ValueError if it is damaged."""
        self.path, self._stride = path, 4 * dim
        self._starts = {FEATURES: 0, OFFSETS: 0}
        if (path / GALLERY).is_file():
            info = read_info(path)
            self.count = info.num_items
            self._starts[FEATURES] = matrix_start(path / FEATURES, "<f4", (self.count, dim))
            self._starts[OFFSETS] = matrix_start(path / OFFSETS, "<u8", (self.count + 1, 2))
        else:
            self.count = int((path / COMMITTED).read_bytes())
        self._files = {name: (path / name).open("rb") for name in _NAMES}

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        with (self.path / ITEMS).open("rb") as lines:
            for position in range(self.count):
                try:
                    yield position, parse_item(lines.readline())
                except ValueError as error:
                    raise ValueError(
                        f"{self.path / ITEMS}, line {position + 1}: {error}: remove {self.path}"
                    ) from error

    def features(self, position: int) -> bytes:
        """Return the features of an item as little-endian float32."""
        start = self._starts[FEATURES] + position * self._stride
        return self._read(FEATURES, start, self._stride)

    def thumbnail(self, position: int) -> bytes:
        start = self._starts[OFFSETS] + position * _PAIR
        _, begin, _, end = struct.unpack("<4Q", self._read(OFFSETS, start, 2 * _PAIR))
        return self._read(THUMBNAILS, begin, end - begin)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _read(self, name: str, start: int, size: int) -> bytes:
        data = os.pread(self._files[name].fileno(), size, start) if size >= 0 else b""
        if len(data) != size:
            raise ValueError(f"{self.path / name} is truncated: remove {self.path}")
        return data


class RowWriter:
    """Appends items to a new part. Items appended before the last `commit` survive if the process
    is killed."""

    def __init__(self, path: Path, *, dim: int) -> None:
        path.mkdir()
        self.path, self.count, self._dim = path, 0, dim
        self._files = {name: (path / name).open("wb") for name in _NAMES}
        self._ends = np.zeros(2, "<u8")
        self._files[OFFSETS].write(self._ends.tobytes())
        self.commit()

    def append(self, item: Item, features: np.ndarray, thumbnail: bytes) -> None:
        """Append an item with its features, float32 [dim]."""
        assert features.shape == (self._dim,)
        line = item_line(item)
        self._ends += np.array([len(line), len(thumbnail)], "<u8")
        self._files[THUMBNAILS].write(thumbnail)
        self._files[FEATURES].write(features.astype("<f4", copy=False).tobytes())
        self._files[OFFSETS].write(self._ends.tobytes())
        self._files[ITEMS].write(line)
        self.count += 1

    def commit(self) -> None:
        """Sync all files to disk and then record the number of items."""
        for file in self._files.values():
            flush(file)
        commit(self.path / COMMITTED, str(self.count).encode())

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Commit, so that no items are lost on an interrupt. If writing failed, for example because
        the disk is full, keep only the items of the last commit."""
        try:
            if not isinstance(error, OSError):
                self.commit()
        finally:
            for file in self._files.values():
                file.close()
