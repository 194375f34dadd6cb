"""Prints the peak memory of training steps with FusedSGD, in addition to the class rows.

`python -m tests.heads.fused_memory bf16 deferred` must run in a process of its own. It prints the
bytes of the rows and the bytes that two steps need in addition.
"""

import sys

import torch

from benchmarks.timing import resident, restart_high_water_mark
from heads import ClassHead, CrossEntropy, FusedSGD
from heads.build import ROW_DTYPES

CLASSES, DIM, BATCH, MEMORY_MIB = 1_000_000, 32, 32, 32


def extra_bytes(dtype: str, *, deferred: bool) -> tuple[int, int]:
    """Return the bytes of the rows and the additional peak memory of two steps."""
    head = ClassHead(
        DIM, CLASSES, CrossEntropy(), dtype=ROW_DTYPES[dtype], bias=False, memory_mib=MEMORY_MIB
    )
    optimizer = FusedSGD(head, lr=0.1, deferred=deferred)
    features = torch.randn(BATCH, DIM, requires_grad=True)
    labels = torch.randint(CLASSES, (BATCH,))
    before = restart_high_water_mark()
    for _ in range(2):
        head(features, labels).backward()
        optimizer.step()
    return head.weight.nbytes, resident("VmHWM") - before


if __name__ == "__main__":
    print(*extra_bytes(sys.argv[1], deferred=sys.argv[2] == "deferred"))
