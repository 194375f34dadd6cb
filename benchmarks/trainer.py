"""The trainer against a bare loop, checkpoints and imports: `python -m benchmarks.trainer`."""

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks import checkpoints, trainer_step
from benchmarks.timing import Row, Sections, command_line, report

ROUNDS = 5


def imports() -> Iterator[Row]:
    """Measure the CPU time of the imports of a rank, and of torch alone, each in new processes."""
    found: dict[str, list[float]] = {"trainer.train": [], "torch": []}
    for _ in range(ROUNDS):
        for module, seconds in found.items():
            code = f"import time, {module}; print(time.process_time())"
            done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
            seconds.append(json.loads(done.stdout))
    ours, alone = (float(np.median(seconds)) for seconds in found.values())
    details = f"torch alone {alone:.1f}, medians of {ROUNDS}"
    yield Row("import of trainer.train", "CPU-seconds", f"{ours:.1f}", "<= 3.5", details)


SECTIONS: Sections = {
    "step": trainer_step.rows,
    "checkpoints": checkpoints.rows,
    "imports": imports,
}

if __name__ == "__main__":
    report(command_line("trainer", __doc__).parse_args(), SECTIONS)
