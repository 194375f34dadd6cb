"""A safetensors file that holds one float32 matrix, written in blocks and read by the row.

Any safetensors reader opens it. It is not a general writer: one tensor, row-major, float32.
"""

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ITEM_BYTES = 4
# The format's own limit on the header; a damaged length must not make us read gigabytes.
_MAX_HEADER_BYTES = 100_000_000


def write_rows(
    path: Path, blocks: Iterable[Tensor], *, name: str, num_rows: int, width: int
) -> None:
    """Write `blocks` [rows, width], one after the other, as the tensor `name` [num_rows, width].

    Only one block is held at a time. Raises ValueError when the blocks do not add up to the
    shape, or hold a number that is not finite.
    """
    header = _header(name, num_rows, width)
    written = 0
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != width:
                raise ValueError(
                    f"{path.name}: a block of shape {list(block.shape)} is no rows of {width}"
                )
            rows = block.detach().to("cpu", torch.float32).contiguous()
            if not bool(torch.isfinite(rows).all()):
                bad = int((~torch.isfinite(rows).all(1)).nonzero()[0]) + written
                raise ValueError(
                    f"{path.name}: row {bad} holds NaN or infinity; the run has diverged, "
                    "export an earlier checkpoint"
                )
            file.write(rows.numpy().astype("<f4", copy=False).data)
            written += len(rows)
        if written != num_rows:
            raise ValueError(f"{path.name}: {written} rows came for {num_rows} classes")
        file.flush()
        os.fsync(file.fileno())


def _header(name: str, num_rows: int, width: int) -> bytes:
    size = num_rows * width * _ITEM_BYTES
    entry = {"dtype": "F32", "shape": [num_rows, width], "data_offsets": [0, size]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # the data starts aligned, as the format asks


class RowFile:
    """Rows of one float32 matrix on disk, each read where it lies.

    `pread` and not a memory map: the kernel reads megabytes ahead of a mapped access, and a cold
    row then costs milliseconds instead of microseconds.
    """

    def __init__(self, path: Path, *, name: str, num_rows: int, width: int) -> None:
        self.path, self.num_rows, self.width = path, num_rows, width
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._start = self._check_header(name)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        self._close()

    def read(self, rows: Sequence[int]) -> Tensor:
        """Rows -> [len(rows), width]. Raises ValueError for a row outside the matrix."""
        assert self._close.alive, "the file is closed"
        out = np.empty((len(rows), self.width), dtype="<f4")
        stride = self.width * _ITEM_BYTES
        for place, row in enumerate(rows):
            if not 0 <= row < self.num_rows:
                raise ValueError(f"class id {row} is not within 0 … {self.num_rows - 1}")
            count = os.preadv(
                self._descriptor, [memoryview(out[place]).cast("B")], self._start + row * stride
            )
            if count != stride:
                raise ValueError(f"{self.path} ends within row {row}: copy the bundle again")
        return torch.from_numpy(out)

    def _check_header(self, name: str) -> int:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{self.path} is not a safetensors file, or is cut short")
        entry = _parse_header(os.pread(self._descriptor, length, 8)).get(name)
        expected = {
            "dtype": "F32",
            "shape": [self.num_rows, self.width],
            "data_offsets": [0, self.num_rows * self.width * _ITEM_BYTES],
        }
        if entry != expected:
            raise ValueError(
                f"{self.path} should hold {name!r}, float32 {expected['shape']}; it says {entry}"
            )
        if size != 8 + length + self.num_rows * self.width * _ITEM_BYTES:
            raise ValueError(f"{self.path} is cut short or damaged: copy the bundle again")
        return 8 + length


def _parse_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}
