"""Time and memory to generate the initial rows of a head, compared with torch's generator.

The peak memory is measured in a separate process, whose high-water mark is read from the kernel:

    python -m benchmarks.initial_rows     # rows of 10,000,000 classes
"""

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.peak_memory import resident, restart_high_water_mark
from benchmarks.timing import Row, ratio_row, take_turns
from heads.rows.initial_rows import initial_rows
from heads.tree import LabelTree
from heads.weights import ClassWeights

CLASSES, MANY, DIM = 1_000_000, 10_000_000, 64


def rows() -> Iterator[Row]:
    weights = ClassWeights(LabelTree.dense(CLASSES), device=torch.device("cpu"))
    contenders = {
        "ours": lambda: initial_rows(weights, DIM, seed=0, std=0.01),
        "torch": lambda: torch.randn(CLASSES, DIM),
    }
    times = take_turns(contenders, title="initial rows", seconds=30)
    case = f"K = {CLASSES:,}, d = {DIM}"
    yield ratio_row("initial rows / torch.randn", case, times["ours"], times["torch"])
    gigabytes = 4e-9 * CLASSES * DIM
    found = (f"{np.median(times[name]) / gigabytes:.1f}" for name in ("ours", "torch"))
    yield Row("initial rows, torch.randn", case, " and ".join(found) + " s/GB")
    command = [sys.executable, "-m", "benchmarks.initial_rows"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    ratio, seconds = map(float, done.stdout.split())
    what, case = "peak memory / size of the initial rows", f"K = {MANY:,}, d = {DIM}"
    yield Row(what, case, f"{ratio:.2f}", "<= 1.02", f"generated in {seconds:.1f} s")


def peak() -> tuple[float, float]:
    """Return the peak memory divided by the size of the rows, and the seconds."""
    tree = LabelTree.dense(MANY)
    assert not tree.has_children.any()  # computed on first use and stored with the tree
    weights = ClassWeights(tree, device=torch.device("cpu"))
    before, started = restart_high_water_mark(), time.perf_counter()
    made = initial_rows(weights, DIM, seed=0, std=0.01).held
    seconds = time.perf_counter() - started
    return (resident("VmHWM") - before) / made.nbytes, seconds


if __name__ == "__main__":
    print(*peak())
