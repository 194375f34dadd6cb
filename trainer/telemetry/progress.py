"""Console output of a run: speed and memory use, as a progress bar on a terminal or as plain
lines.
"""

import sys
import time
from collections import deque
from dataclasses import dataclass
from textwrap import fill
from typing import Literal

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

# Number of reports used to estimate the remaining time. It is large enough to include evaluations
# and checkpoints, but small enough to soon exclude the first steps, which compile and warm up.
_REPORTS = 50
MemoryKind = Literal["resident", "device_allocated", "device_reserved", "device_peak"]
# Minimum terminal width, in columns, for the long form.
_WIDE_COLUMNS = 110


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


def limiting_memory(used: dict[MemoryKind, int]) -> int:
    """Return the kind of memory that usually runs out first: host memory on CPUs, otherwise device
    memory.
    """
    return used.get("device_reserved", used["resident"])


@dataclass(frozen=True)
class StepSummary:
    """The numbers of a logged step that are shown on the console."""

    loss: float
    learning_rate: float
    samples_per_second: float
    data_wait_ratio: float
    memory_bytes: int
    remaining_seconds: float
    mfu: float | None

    def line(self) -> str:
        speed = f"{self._speed()}  data wait {self.data_wait_ratio:.0%}"
        loss = f"loss {self.loss:.4f}  lr {self.learning_rate:.2e}"
        return f"{loss}  {speed}{self._mfu()}  {self._memory()}  ETA {self._remaining()}"

    def compact(self, columns: int) -> str:
        if columns >= _WIDE_COLUMNS:
            speed = f"{self._speed()}  data wait {self.data_wait_ratio:.0%}"
            numbers = f"loss {self.loss:.4f}  {speed}{self._mfu()}  {self._memory()}"
        else:
            speed = f"{self._speed()}  wait {self.data_wait_ratio:.0%}"
            numbers = f"loss {self.loss:.3f}  {speed}"
        return f"{numbers}  ETA {self._remaining()}"

    def _speed(self) -> str:
        digits = 0 if self.samples_per_second >= 10 else 2
        return f"{self.samples_per_second:.{digits}f} samples/s"

    def _mfu(self) -> str:
        return "" if self.mfu is None else f"  MFU {self.mfu:.0%}"

    def _memory(self) -> str:
        mebibytes = self.memory_bytes / 2**20
        return f"{mebibytes:.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:.1f} GiB"

    def _remaining(self) -> str:
        minutes, seconds = divmod(round(self.remaining_seconds), 60)
        hours, minutes = divmod(minutes, 60)
        days, rest = divmod(hours, 24)
        return f"{days}d{rest:02}h" if days > 1 else f"{hours}:{minutes:02}:{seconds:02}"


class Screen:
    """The console output of rank 0: lines and the progress bar."""

    def __init__(self, *, start_step: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self.console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.bar, self.bar_task = self._start_bar(start_step)

    def print_line(self, line: str) -> None:
        """Print one line. It is wrapped at word boundaries only on a terminal."""
        if self.bar is not None:
            width = self.console.width
            line = fill(line, width, break_long_words=False, break_on_hyphens=False)
        self.console.print(line)

    def beat(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.bar_task, completed=step)

    def step(self, step: int, shown: StepSummary) -> None:
        if self.bar is not None:
            numbers = shown.compact(self.console.width)
            self.bar.update(self.bar_task, completed=step, numbers=numbers)
        else:
            self.print_line(f"step {step}/{self.num_steps}  {shown.line()}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _start_bar(self, start_step: int) -> tuple[Progress | None, TaskID]:
        # Check isatty too, because rich treats a file as a terminal if FORCE_COLOR is set.
        if not (sys.stdout.isatty() and self.console.is_interactive):
            return None, TaskID(0)
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),  # use the rest of the line
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
        )
        bar.start()
        self.console.show_cursor(True)  # a killed rank could not restore the cursor
        return bar, bar.add_task("", total=self.num_steps, completed=start_step, numbers="")
