"""Memory for batches of pixels. A loader process fills the same shared memory again and again.

Fresh shared memory costs a page fault every 4 KiB, which took as long as a third of decoding.
"""

import math

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

# Batches that a loader process has made, or is told to make, before the trainer takes the next one.
PREFETCHED = 2
# Besides them, one is being made and one is being copied.
_NUM_SLOTS = PREFETCHED + 2


class PixelMemory:
    """Where the batches of one process are made. Not sent to other processes: each has its own."""

    def __init__(self) -> None:
        self._slots: list[torch.UntypedStorage | None] = [None] * _NUM_SLOTS
        self._turn = 0

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """uint8 of `shape`, to be filled. In a loader process it is shared with the trainer, and
        written to anew `PREFETCHED` + 2 batches later: the trainer copies it before that."""
        if get_worker_info() is None:
            return torch.empty(shape, dtype=torch.uint8)
        size = math.prod(shape)
        self._turn = (self._turn + 1) % _NUM_SLOTS
        slot = self._slots[self._turn]
        if slot is None or slot.nbytes() < size:
            # As torch's own collating does in a loader process.
            slot = self._slots[self._turn] = torch.UntypedStorage._new_shared(size)
        pixels = torch.empty(0, dtype=torch.uint8)
        return pixels.set_(slot, 0, shape)  # type: ignore[call-overload]

    def __reduce__(self) -> tuple[type["PixelMemory"], tuple[()]]:
        return PixelMemory, ()
