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

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_ITEM_BYTES = 4
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
        """Raises ValueError if the file does not contain exactly one tensor, `name`, float32
        [num_rows, width]."""
        self.path, self.num_rows, self.width = path, num_rows, width
        try:
            with safe_open(path, framework="numpy") as file:
                found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                shapes = {key: (part.get_dtype(), part.get_shape()) for key, part in found.items()}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): copy the bundle again") from error
        if shapes != {name: ("F32", [num_rows, width])}:
            raise ValueError(
                f"{path} contains {shapes}, expected float32 [{num_rows}, {width}] as {name!r}: "
                "copy the bundle again"
            )
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        # The format has no gaps, so the only tensor ends with the file.
        self._start = os.fstat(self._descriptor).st_size - num_rows * width * _ITEM_BYTES

    def close(self) -> None:
        """Close the file. `read` must not be called afterwards."""
        self._close()

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the rows as a tensor [len(rows), width]. Raises ValueError if a row is out of
        range."""
        assert self._close.alive, "the file is closed"
        stride = self.width * _ITEM_BYTES
        out = np.empty((len(rows), self.width), dtype="<f4")
        for row, part in zip(rows, out, strict=True):
            if not 0 <= row < self.num_rows:
                raise ValueError(f"class ID {row} is out of range 0 … {self.num_rows - 1}")
            if os.preadv(self._descriptor, [part], self._start + row * stride) != stride:
                raise ValueError(f"{self.path} ends within row {row}: copy the bundle again")
        return torch.from_numpy(out)

    def blocks(self, num_rows: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield blocks of `num_rows` consecutive rows [rows, width] that together contain all rows,
        each with the number of its first row. By default, a block has at most 64 MiB and
        65,536 rows. Do not write to the blocks.
        """
        assert self._close.alive, "the file is closed"
        # Reading ahead is what a sequential read needs. The map is private, because torch warns
        # about memory that it cannot write to.
        content = mmap(self._descriptor, 0, access=ACCESS_COPY)
        matrix = np.frombuffer(content, "<f4", offset=self._start).reshape(-1, self.width)
        fitting = max(1, _BLOCK_BYTES // (self.width * _ITEM_BYTES))
        at_once = num_rows or min(_MAX_BLOCK_ROWS, fitting)
        for first in range(0, self.num_rows, at_once):
            yield first, torch.from_numpy(matrix[first : first + at_once])
