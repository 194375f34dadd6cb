"""What a trial of the soak found: said as it ends, and summed up as a table."""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    """`seconds`: from the fault to the next step, where that is measured."""

    what: str
    sound: bool
    found: str
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """The trials of one kind."""

    kind: str
    trials: tuple[Trial, ...]

    @property
    def sound(self) -> bool:
        return all(trial.sound for trial in self.trials)

    @property
    def row(self) -> str:
        good = sum(trial.sound for trial in self.trials)
        seconds = [trial.seconds for trial in self.trials if trial.seconds is not None]
        took = "-"
        if seconds:
            took = f"{statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
        return f"| {self.kind} | {good} of {len(self.trials)} | {took} |"


def ran(kind: str, trials: Iterable[Trial]) -> Summary:
    """Run the trials, a line each."""
    return Summary(kind, tuple(_said(kind, trials)))


def _said(kind: str, trials: Iterable[Trial]) -> Iterator[Trial]:
    for trial in trials:
        took = "" if trial.seconds is None else f", next step after {trial.seconds:.1f} s"
        mark = "ok  " if trial.sound else "FAIL"
        print(f"{time.strftime('%H:%M:%S')} {mark} {kind}: {trial.what}: {trial.found}{took}")
        yield trial


def table(summaries: Iterable[Summary]) -> str:
    """Markdown."""
    head = ["| trials | sound | from the fault to the next step |", "| --- | --- | --- |"]
    return "\n".join([*head, *(summary.row for summary in summaries)]) + "\n"


def write_table(path: Path, summaries: Iterable[Summary], *, seed: int, machine: str) -> None:
    date = time.strftime("%Y-%m-%d")
    text = f"Seed {seed}, {date}, on {machine}.\n\n{table(summaries)}"
    path.write_text(text, encoding="utf-8")
