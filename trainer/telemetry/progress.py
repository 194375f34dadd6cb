"""Console output of a run: speed and memory use, as a progress bar on a terminal or as plain
lines.
"""

import sys
import time
from collections import deque
from collections.abc import Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch

if TYPE_CHECKING:
    from rich.progress import Progress

# Number of reports used to estimate the remaining time. It is large enough to include evaluations
# and checkpoints, but small enough to soon exclude the first steps, which compile and warm up.
_REPORTS = 50
MemoryKind = Literal["resident", "device_allocated", "device_reserved", "device_peak"]


class Pace:
    """Measures the time per step and estimates the remaining time."""

    def __init__(self, *, start_step: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._last_time, self._last_step = time.perf_counter(), start_step
        self._reports = deque([(self._last_time, start_step)], maxlen=_REPORTS)

    def report(self, step: int, excluded_seconds: float) -> tuple[float, int]:
        """Return the training time in seconds and the number of steps since the last report.

        `excluded_seconds` (the time of evaluations and checkpoints) does not count as training
        time, but is included in the estimate of the remaining time.
        """
        now = time.perf_counter()
        elapsed = max(now - self._last_time - excluded_seconds, 1e-9)
        steps = max(step - self._last_step, 1)
        self._last_time, self._last_step = now, step
        self._reports.append((now, step))
        return elapsed, steps

    def remaining_seconds(self) -> float:
        """Return the remaining time, estimated from the speed of the last reports."""
        (first_time, first), (last_time, last) = self._reports[0], self._reports[-1]
        return (last_time - first_time) / max(last - first, 1) * (self._num_steps - last)


def memory_bytes(device: torch.device) -> dict[MemoryKind, int]:
    """Return the memory in use, in bytes. `resident` is the host memory of this process. On CUDA,
    the result also contains the device memory allocated by tensors, the device memory reserved by
    torch, and the peak allocated by tensors.
    """
    used: dict[MemoryKind, int] = {"resident": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        used["device_allocated"] = torch.cuda.memory_allocated(device)
        used["device_reserved"] = torch.cuda.memory_reserved(device)
        used["device_peak"] = torch.cuda.max_memory_allocated(device)
    return used


def line_of(numbers: Mapping[str, Any], remaining_seconds: float, *, short: bool) -> str:
    """Return the numbers of a logged step as text. A `short` text fits beside a progress bar."""
    rate, wait = numbers["samples_per_second"], numbers["data_wait_ratio"]
    speed = f"{rate:.{0 if rate >= 10 else 2}f} samples/s"
    minutes, seconds = divmod(round(remaining_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    remaining = f"{days}d{rest:02}h" if days > 1 else f"{hours}:{minutes:02}:{seconds:02}"
    if short:
        return f"loss {numbers['loss']:.3f}  {speed}  wait {wait:.0%}  ETA {remaining}"
    # Host memory usually runs out first on CPUs, otherwise device memory.
    used = numbers["memory"]
    mebibytes = used.get("device_reserved", used["resident"]) / 2**20
    memory = f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.1f} GiB"
    return (
        f"loss {numbers['loss']:.4f}  lr {numbers['learning_rate']:.2e}  {speed}  "
        f"data wait {wait:.0%}  {memory}  ETA {remaining}"
    )


class Screen:
    """The console output of rank 0: lines and, on a terminal, the progress bar."""

    def __init__(self, *, start_step: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._start_bar(start_step)

    def print_line(self, line: str) -> None:
        """Print one line. It is wrapped at word boundaries only on a terminal."""
        if self._bar is None:
            print(line, flush=True)
        else:
            width = self._bar.console.width
            self._bar.console.print(
                fill(line, width, break_long_words=False, break_on_hyphens=False)
            )

    def beat(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def step(self, step: int, numbers: Mapping[str, Any], remaining_seconds: float) -> None:
        if self._bar is not None:
            text = line_of(numbers, remaining_seconds, short=True)
            self._bar.update(self._task, completed=step, numbers=text)
        else:
            text = line_of(numbers, remaining_seconds, short=False)
            self.print_line(f"step {step}/{self._num_steps}  {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start_bar(self, start_step: int) -> None:
        # Imported here, because its import takes time and a run off a terminal does not use it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        if not console.is_interactive:
            return
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),  # use the rest of the line
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._bar.start()
        console.show_cursor(True)  # a killed rank could not restore the cursor
        self._task = self._bar.add_task("", total=self._num_steps, completed=start_step, numbers="")
