"""Time and memory that creating the order of samples takes if `data.sampling.power` is below 1.

python -m benchmarks.data_sampling      # in a process of its own, whose peak memory is measured
"""

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.peak_memory import resident, restart_high_water_mark
from benchmarks.timing import Row
from data.loading.sampling import SampledOrder, class_groups

SAMPLES, CLASSES, POWER = 100_000_000, 1_000_000, 0.5


def rows() -> Iterator[Row]:
    command = [sys.executable, "-m", "benchmarks.data_sampling"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds, kept, peak = map(float, done.stdout.split())
    case = f"{SAMPLES:,} samples of {CLASSES:,} classes"
    yield Row("create the order of sampling with power < 1", case, f"{seconds:.0f} s")
    yield Row("memory of this order", case, f"{kept:.1f} GB", details=f"peak {peak:.1f} GB")


def _create() -> tuple[float, float, float]:
    """Return the seconds, the memory that the order keeps, and the peak memory, in GB."""
    labels = np.random.default_rng(0).integers(CLASSES, size=SAMPLES, dtype=np.int32)
    before, started = restart_high_water_mark(), time.perf_counter()
    # The labels of a split are int64.
    order = SampledOrder(0, class_groups(labels.astype(np.int64), CLASSES, POWER), SAMPLES)
    seconds = time.perf_counter() - started
    order.locate(np.arange(1000))
    memory = (resident(name) - before for name in ("VmRSS", "VmHWM"))
    return seconds, *(total / 1e9 for total in memory)


if __name__ == "__main__":
    print(*_create())
