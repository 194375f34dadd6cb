"""Peak memory of a head step in addition to its weights and their gradient, with K = 1,000,000.

Each loss runs in a separate process, whose high-water mark is read from the kernel.

    python -m benchmarks.peak_memory ce      # one loss, in MB
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.head_step import Step, loss_head
from benchmarks.timing import Row
from heads.losses import LOSSES

CLASSES, DIM, BATCH = 1_000_000, 64, 512
_LIMIT_MIB = 256  # the memory limit for logits
_MOST_MB = 300


def peaks() -> Iterator[Row]:
    """Measure every loss. The logits of a naive step and their gradient would take 4,096 MB."""
    found = {}
    for kind in track(LOSSES, "peak memory", console=Console(stderr=True), transient=True):
        command = [sys.executable, "-m", "benchmarks.peak_memory", kind]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[kind] = float(done.stdout)
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


def extra_megabytes(kind: str) -> float:
    """Return the peak memory of a step, less the memory before it and the weights' gradient."""
    torch.manual_seed(0)
    head = loss_head(kind, CLASSES, DIM)
    head.engine = replace(head.engine, memory_bytes=_LIMIT_MIB << 20)
    features = torch.randn(BATCH, DIM, requires_grad=True)
    step = Step(head, features, torch.randint(CLASSES, (BATCH,)))
    before = restart_high_water_mark()
    step()
    return (resident("VmHWM") - before - head.weight.nbytes) / 1e6


def restart_high_water_mark() -> int:
    """Reset VmHWM to the current memory of this process and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """Return this process's current (VmRSS) or peak (VmHWM) memory in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    print(f"{extra_megabytes(sys.argv[1]):.1f}")
