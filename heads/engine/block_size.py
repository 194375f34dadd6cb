"""The size of a block of classes on a processor: this one, or one for which a run is planned."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

# The default memory limit for logits on a CPU. With it, the logits of 100,000 classes and 256 rows
# are kept for the backward pass, instead of being computed a second time.
CPU_MEMORY_MIB = 512
# On a GPU, the default is its memory divided by 32, rounded up to a multiple of 256 MiB. The memory
# that torch reports depends on the driver and is up to 2% less than the size in
# `launch/plan/devices.py`. Both give the same limit after rounding, so `kway plan` computes the
# blocks of the run.
_GPU_SHARE = 32
_STEP_MIB = 256

# The logits of one block may use the limit divided by this. The part is smaller on a CPU, because
# several tensors of this size exist at the same time, and glibc cannot reuse all of the memory of
# those that were freed.
_BLOCK_SHARE, _CPU_BLOCK_SHARE = 8, 32
_FEWEST_CLASSES = 64
# glibc serves larger allocations with mmap, which returns fresh pages, so every allocation would
# cause one page fault per 4 KiB.
_CACHED_BYTES = 16 << 20
# cuBLAS computes products in tiles of 128 x 128 or 128 x 256 numbers, one per SM at a time. The
# logits [G, C] are ceil(G / 128) * C / 128 tiles of 128 x 128. If C is a multiple of 128 * (number
# of SMs), every SM computes the same number of them, for any number of rows G: the last wave of
# tiles occupies the whole GPU. With tiles of 128 x 256, this is so if C is an even multiple, or if
# the number of rows of tiles is even. It also holds for the gradient [C, d] of the class rows, with
# C / 128 * ceil(d / 128) tiles. The gradient [G, d] of the features is a sum over C, which cuBLAS
# can split.
_TILE_COLUMNS = 128


@dataclass(frozen=True)
class Processor:
    """A device that computes logits.

    `kind` is its type in torch. For a GPU, `memory_bytes` is the size of its memory and `num_sms`
    the number of its streaming multiprocessors (SMs).
    """

    kind: str
    memory_bytes: int = 0
    num_sms: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "Processor":
        if device.type != "cuda":
            return cls(device.type)
        found = torch.cuda.get_device_properties(device)
        return cls(device.type, found.total_memory, found.multi_processor_count)

    @property
    def default_memory_mib(self) -> int:
        """The default memory limit for logits in MiB, 2,560 for a GPU with 80 GB."""
        if self.kind != "cuda":
            return CPU_MEMORY_MIB
        return -(-self.memory_bytes // (_GPU_SHARE * _STEP_MIB << 20)) * _STEP_MIB

    def classes_at_once(self, column_bytes: int, memory_bytes: int) -> int:
        """Return the number of classes per block, given the bytes of the logits (or of the row) of
        one class and the memory limit for logits.

        A block has at least 64 classes, and more if they fit in an eighth of the limit, or on a CPU
        in 1/32 of it. The number of classes is a power of two, or on a GPU, if that fits, a power
        of two times the classes of a wave of tiles. Adding one row to a batch therefore usually
        does not change the blocks.
        """
        piece = memory_bytes // _BLOCK_SHARE
        if self.kind == "cpu":
            piece = min(memory_bytes // _CPU_BLOCK_SHARE, _CACHED_BYTES)
        fitting = piece // column_bytes
        wave = _TILE_COLUMNS * self.num_sms
        if 0 < wave <= fitting:
            return wave * _power_of_two(fitting // wave)
        return max(_FEWEST_CLASSES, _power_of_two(fitting))


def bytes_of_class(
    *,
    rows: int,
    dim: int,
    held: torch.dtype,
    compute: torch.dtype,
    stats: torch.dtype,
    copies: bool,
    is_cuda: bool,
) -> int:
    """Return the bytes of the largest tensor of a block per class: the logits of `rows` rows, or a
    copy of the class rows, with `dim` numbers each, or of their gradient.

    held, compute, stats: types of the class rows, the products and the logits. copies: whether the
    walk copies the rows or writes their gradient even if it does not convert them.
    """
    logits = rows * stats.itemsize
    if copies or held not in (compute, stats):
        return max(logits, dim * stats.itemsize)
    return max(logits, dim * compute.itemsize) if is_cuda and compute != stats else logits


def saved_blocks(sizes: Sequence[int], itemsize: int, budget: int) -> tuple[bool, int]:
    """Return whether forward saves the graphs of all blocks, and otherwise how many blocks of
    logits it saves, given the number of logits of each block and the memory limit for logits.

    A graph needs about three times the memory of its logits.
    """
    if 3 * sum(sizes) * itemsize <= budget // 2:
        return True, len(sizes)
    return False, sum(end * itemsize <= budget // 4 for end in accumulate(sizes))


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, or 0 for 0."""
    return 1 << number.bit_length() >> 1
