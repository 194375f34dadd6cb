"""What a trial of the soak found: said as it ends, summed up in a table, kept in a page."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
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
    """The trials of one kind, with the lines that said so."""

    kind: str
    meaning: str
    trials: tuple[Trial, ...]
    lines: tuple[str, ...]

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
        return f"| `{self.kind}`: {self.meaning} | {good} of {len(self.trials)} | {took} |"


def ran(kind: str, meaning: str, trials: Iterable[Trial]) -> Summary:
    """Run the trials, a line each."""
    said = list(_said(kind, trials))
    return Summary(
        kind, meaning, tuple(trial for trial, _ in said), tuple(line for _, line in said)
    )


def _said(kind: str, trials: Iterable[Trial]) -> Iterator[tuple[Trial, str]]:
    for trial in trials:
        took = "" if trial.seconds is None else f", next step after {trial.seconds:.1f} s"
        mark = "ok  " if trial.sound else "FAIL"
        line = f"{time.strftime('%H:%M:%S')} {mark} {kind}: {trial.what}: {trial.found}{took}"
        print(line)
        yield trial, line


def write_page(path: Path, summaries: Sequence[Summary], *, seed: int, machine: str) -> None:
    """The page of a soak so far, as markdown: a table, then every line of its log."""
    rows = "\n".join(summary.row for summary in summaries)
    log = "\n".join(line for summary in summaries for line in summary.lines)
    path.write_text(
        f"""# The soak

Every fault in full counts, as `make soak` wrote it here: seed {seed}, {time.strftime("%Y-%m-%d")},
on {machine}.

| trials | sound | from the fault to the next step |
| --- | --- | --- |
{rows}

## Its log

```
{log}
```
""",
        encoding="utf-8",
    )
