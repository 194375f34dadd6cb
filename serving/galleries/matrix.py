"""Files with their checksum, written once; and safetensors files of one matrix among them.

A general safetensors file has several tensors; these have one, so that its bytes can be streamed.
"""

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np

from data.files import flush
from data.shards.mapped import mapped
from serving.galleries.manifest import AGAIN, FileInfo

Kind = Literal["<f4", "<u8"]
_DTYPES = {"<f4": "F32", "<u8": "U64"}
_TENSOR = "matrix"
# Long before it a damaged length would make us read gigabytes.
_MAX_HEADER_BYTES = 4096


class HashedFile:
    """A new file, hashed while it is written and on the disk when it is closed."""

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


def matrix_header(kind: Kind, shape: tuple[int, int]) -> bytes:
    """What stands before the rows of a matrix in its safetensors file."""
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    entry = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({_TENSOR: entry}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % 64)  # rows begin where vector instructions like it
    return len(header).to_bytes(8, "little") + header


def matrix_start(path: Path, kind: Kind, shape: tuple[int, int]) -> int:
    """Where the rows begin. Raises ValueError unless the file holds exactly this matrix."""
    wanted = matrix_header(kind, shape)
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    with path.open("rb") as file:
        found = file.read(min(len(wanted), _MAX_HEADER_BYTES))
        if found != wanted:
            raise ValueError(f"{path} does not hold {_DTYPES[kind]} {list(shape)}: {AGAIN}")
        if os.fstat(file.fileno()).st_size != len(wanted) + size:
            raise ValueError(f"{path} is cut short or damaged: {AGAIN}")
    return len(wanted)


def map_matrix(path: Path, kind: Kind, shape: tuple[int, int]) -> np.ndarray:
    """The matrix, read-only, in memory that all processes of the machine share."""
    start = matrix_start(path, kind, shape)
    with path.open("rb") as file:
        return mapped(file)[start:].view(kind).reshape(shape)
