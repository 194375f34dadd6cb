"""A copy of this rank's pieces in host memory, so that training may change them meanwhile."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoints.pieces import Piece, bytes_of

_ALIGNMENT = 64


class Staging:
    """One buffer as large as what this rank writes, used again by every save.

    Pinned where the pieces are on CUDA; torch rounds pinned memory up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces over the buffer, which must be free: what it held before is lost."""
        begins = self.reserve(pieces)
        copies = []
        for piece, begin in zip(pieces, begins, strict=True):
            copy = self._view(begin, piece.tensor)
            _copy(piece.tensor, copy)
            copies.append(replace(piece, tensor=copy))
        if _on_cuda(pieces):
            torch.cuda.current_stream().synchronize()
        return copies

    def reserve(self, pieces: Sequence[Piece]) -> list[int]:
        """Have a buffer for these pieces; where in it each begins, in bytes."""
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + -(-piece.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        if len(self._buffer) != ends[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # never two of them
            pinned = _on_cuda(pieces)
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=pinned)
            self._buffer.fill_(0)  # the kernel hands out pages when they are first written
        return ends[:-1]

    def _view(self, begin: int, like: Tensor) -> Tensor:
        part = self._buffer[begin : begin + like.nbytes]
        return part.view(like.dtype).view(like.shape)


def _on_cuda(pieces: Sequence[Piece]) -> bool:
    return any(piece.tensor.is_cuda for piece in pieces)


def _copy(source: Tensor, into: Tensor) -> None:
    if source.is_cuda or not source.is_contiguous():
        into.copy_(source, non_blocking=source.is_cuda)
    else:
        # In one thread: torch would take all cores and wait for those that the loader's workers
        # have, which was 20 times slower on a machine that was busy.
        np.copyto(bytes_of(into), bytes_of(source))
