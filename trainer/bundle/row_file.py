"""A safetensors file with one float32 matrix, written in blocks and read by row.

Any safetensors reader can open the file. The writer supports only a single row-major float32
tensor.
"""

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ITEM_BYTES = 4
# Limits on the rows and bytes of one preadv call, below the kernel's limits.
_MAX_RUN, _MAX_RUN_BYTES = 1024, 1 << 30
# The format's limit on the header size. Without it, a damaged length could cause a read of
# gigabytes.
_MAX_HEADER_BYTES = 100_000_000
_BLOCK_BYTES, _MAX_BLOCK_ROWS = 1 << 26, 1 << 16


def write_rows(
    path: Path, blocks: Iterable[Tensor], *, name: str, num_rows: int, width: int
) -> None:
    """Write `blocks` [rows, width], in order, as the tensor `name` [num_rows, width].

    Only one block is in memory at a time. Raises ValueError if the blocks do not add up to the
    shape or contain a non-finite number.
    """
    written = 0
    with path.open("wb") as file:
        file.write(header_of(name, num_rows, width))
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != width:
                raise ValueError(
                    f"{path.name}: a block has shape {list(block.shape)} instead of [rows, {width}]"
                )
            rows = block.detach().to("cpu", torch.float32).contiguous()
            if not bool(torch.isfinite(rows).all()):
                bad = int((~torch.isfinite(rows).all(1)).nonzero()[0]) + written
                raise ValueError(
                    f"row {bad} of {path.name} contains NaN or infinity because training diverged: "
                    "export an earlier checkpoint"
                )
            file.write(rows.numpy().astype("<f4", copy=False).data)
            written += len(rows)
        if written != num_rows:
            raise ValueError(f"{path.name}: received {written} rows for {num_rows} classes")
        file.flush()
        os.fsync(file.fileno())


def header_of(name: str, num_rows: int, width: int) -> bytes:
    """Return the file's header, which precedes the rows."""
    size = num_rows * width * _ITEM_BYTES
    entry = {"dtype": "F32", "shape": [num_rows, width], "data_offsets": [0, size]}
    header = json.dumps({name: entry}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format requires aligned data
    return len(header).to_bytes(8, "little") + header


class RowFile:
    """A thread-safe reader for individual rows of a float32 matrix on disk.

    It uses `pread` instead of a memory map, because the kernel reads megabytes ahead in a mapped
    file: reading an uncached row would take milliseconds instead of 0.06 ms. The kernel also keeps
    recently used rows in memory.
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
        """Close the file. `read` must not be called afterwards."""
        self._close()

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the rows as a tensor [len(rows), width]. Raises ValueError if a row is out of
        range."""
        assert self._close.alive, "the file is closed"
        outside = [row for row in rows if not 0 <= row < self.num_rows]
        if outside:
            raise ValueError(f"class ID {outside[0]} is out of range 0 … {self.num_rows - 1}")
        out = np.empty((len(rows), self.width), dtype="<f4")
        for run in self._runs(rows):
            self._read_run(rows[run[0]], [out[position] for position in run])
        return torch.from_numpy(out)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of consecutive rows [rows, width] that together contain all rows, each with
        the number of its first row. Do not write to the blocks.
        """
        assert self._close.alive, "the file is closed"
        # Reading ahead is what a sequential read needs. The map is private, because torch warns
        # about memory that it cannot write to.
        mapped = mmap(self._descriptor, 0, access=ACCESS_COPY)
        matrix = np.frombuffer(mapped, "<f4", offset=self._start).reshape(-1, self.width)
        most = max(1, min(_MAX_BLOCK_ROWS, _BLOCK_BYTES // (self.width * _ITEM_BYTES)))
        for first in range(0, self.num_rows, most):
            yield first, torch.from_numpy(matrix[first : first + most])

    def _runs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Group the positions in `rows` into runs of rows that are consecutive in the file."""
        longest = max(1, min(_MAX_RUN, _MAX_RUN_BYTES // (self.width * _ITEM_BYTES)))
        run: list[int] = []
        for position in sorted(range(len(rows)), key=rows.__getitem__):
            if run and (rows[position] != rows[run[-1]] + 1 or len(run) == longest):
                yield run
                run = []
            run.append(position)
        if run:
            yield run

    def _read_run(self, first: int, out: list[np.ndarray]) -> None:
        stride = self.width * _ITEM_BYTES
        count = os.preadv(
            self._descriptor,
            [row.data.cast("B") for row in out],
            self._start + first * stride,
        )
        if count != stride * len(out):
            raise ValueError(
                f"{self.path} ends within row {first + count // stride}: copy the bundle again"
            )

    def _check_header(self, name: str) -> int:
        size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{self.path} is not a safetensors file or is truncated: copy the bundle again"
            )
        entry = _parse_header(os.pread(self._descriptor, length, 8)).get(name)
        expected = {
            "dtype": "F32",
            "shape": [self.num_rows, self.width],
            "data_offsets": [0, self.num_rows * self.width * _ITEM_BYTES],
        }
        if entry != expected:
            raise ValueError(
                f"{self.path}: the header of {name!r} is {entry}, expected float32 "
                f"{expected['shape']}: copy the bundle again"
            )
        if size != 8 + length + self.num_rows * self.width * _ITEM_BYTES:
            raise ValueError(f"{self.path} is truncated or damaged: copy the bundle again")
        return 8 + length


def _parse_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}
