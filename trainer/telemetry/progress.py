"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

import sys
from dataclasses import dataclass
from textwrap import fill

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

# Columns of a terminal from which the numbers are written out.
_WIDE = 110


@dataclass(frozen=True)
class Shown:
    """The numbers of a logged step that a person is shown."""

    loss: float
    learning_rate: float
    samples_per_second: float
    data_wait_ratio: float
    memory_bytes: int
    remaining_seconds: float
    mfu: float | None

    def line(self) -> str:
        speed = f"{self._speed(' samples/s')}  data wait {self.data_wait_ratio:.0%}"
        loss = f"loss {self.loss:.4f}  lr {self.learning_rate:.2e}"
        return f"{loss}  {speed}{self._mfu()}  {self._memory()}  ETA {self._remaining()}"

    def beside_the_bar(self, columns: int) -> str:
        if columns >= _WIDE:
            speed = f"{self._speed(' samples/s')}  data wait {self.data_wait_ratio:.0%}"
            numbers = f"loss {self.loss:.4f}  {speed}{self._mfu()}  {self._memory()}"
        else:
            speed = f"{self._speed('/s')}  data {self.data_wait_ratio:.0%}"
            numbers = f"loss {self.loss:.3f}  {speed}  {self._memory()}"
        return f"{numbers}  ETA {self._remaining()}"

    def _speed(self, unit: str) -> str:
        digits = 0 if self.samples_per_second >= 10 else 2
        return f"{self.samples_per_second:.{digits}f}{unit}"

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
    """Lines and the bar of rank 0."""

    def __init__(self, *, start_step: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self.console = Console(
            file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.bar, self.bar_task = self._start_bar(start_step)

    def say(self, line: str) -> None:
        """One line for a person; on a terminal broken between words, in a log never."""
        if self.bar is not None:
            width = self.console.width
            line = fill(line, width, break_long_words=False, break_on_hyphens=False)
        self.console.print(line)

    def beat(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.bar_task, completed=step)

    def step(self, step: int, shown: Shown) -> None:
        if self.bar is not None:
            numbers = shown.beside_the_bar(self.console.width)
            self.bar.update(self.bar_task, completed=step, numbers=numbers)
        else:
            self.say(f"step {step}/{self.num_steps}  {shown.line()}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _start_bar(self, start_step: int) -> tuple[Progress | None, TaskID]:
        # FORCE_COLOR makes rich take a file for a terminal.
        if not (sys.stdout.isatty() and self.console.is_interactive):
            return None, TaskID(0)
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),  # what the numbers leave of the line
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=self.console,
            expand=True,
        )
        bar.start()
        self.console.show_cursor(True)  # a rank that is killed could not show it again
        return bar, bar.add_task("", total=self.num_steps, completed=start_step, numbers="")
