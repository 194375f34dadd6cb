"""Peak memory of a head step in addition to its weights and their gradient, with K = 1,000,000.

Each loss runs in a process of its own, whose high-water mark is read from the kernel:

    python -m benchmarks.peak_memory ce 1000000     # one loss, in MB
"""

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.head_step import Step, loss_head
from benchmarks.timing import Row, numbers_of_a_process, resident, restart_high_water_mark
from heads.losses import LOSSES

CLASSES, DIM, BATCH = 1_000_000, 64, 512
KINDS = tuple(LOSSES)
_LIMIT_MIB = 256  # the memory limit for logits
_MOST_MB = 300


def rows() -> Iterator[Row]:
    """Measure every loss. The logits of a naive step and their gradient would take 4,096 MB."""
    found = {}
    for kind in track(KINDS, "peak memory", console=Console(stderr=True), transient=True):
        (found[kind],) = numbers_of_a_process("benchmarks.peak_memory", kind, str(CLASSES))
    case = f"K = {CLASSES:,}, B = {BATCH}, d = {DIM}, {_LIMIT_MIB} MiB"
    least, *_, most = sorted(found, key=found.__getitem__)
    every = ", ".join(f"{kind} {megabytes:.0f}" for kind, megabytes in found.items())
    yield Row(
        "extra peak memory of a step, any loss",
        case,
        f"{found[most]:.0f} MB",
        f"<= {_MOST_MB} MB",
        f"most {most}, least {least} {found[least]:.0f}; {every}",
    )


def extra_megabytes(kind: str, classes: int) -> float:
    """Return the peak memory of a step, less the memory before it and the weights' gradient."""
    torch.manual_seed(0)
    head = loss_head(kind, classes, DIM)
    head.engine = replace(head.engine, memory_bytes=_LIMIT_MIB << 20)
    features = torch.randn(BATCH, DIM, requires_grad=True)
    step = Step(head, features, torch.randint(classes, (BATCH,)))
    before = restart_high_water_mark()
    step()
    return (resident("VmHWM") - before - head.weight.nbytes) / 1e6


if __name__ == "__main__":
    print(f"{extra_megabytes(sys.argv[1], int(sys.argv[2])):.1f}")
