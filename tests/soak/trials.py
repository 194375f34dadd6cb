"""The results of trials, which are printed as the trials finish and written to a page."""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Trial:
    """The result of a trial. `seconds` is the time from the fault to the next step, if it was
    measured.
    """

    what: str
    passed: bool
    found: str
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """The trials of one kind, and the lines printed for them."""

    kind: str
    meaning: str
    trials: tuple[Trial, ...]
    lines: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(trial.passed for trial in self.trials)

    @property
    def row(self) -> str:
        num_passed = sum(trial.passed for trial in self.trials)
        seconds = [trial.seconds for trial in self.trials if trial.seconds is not None]
        took = "-"
        if seconds:
            took = f"median {statistics.median(seconds):.1f} s, maximum {max(seconds):.1f} s"
        return f"| `{self.kind}`: {self.meaning} | {num_passed} of {len(self.trials)} | {took} |"


def run_trials(kind: str, meaning: str, trials: Iterable[Trial]) -> Summary:
    """Run the trials and print a line for each."""
    results = list(_printed(kind, trials))
    return Summary(
        kind, meaning, tuple(trial for trial, _ in results), tuple(line for _, line in results)
    )


def _printed(kind: str, trials: Iterable[Trial]) -> Iterator[tuple[Trial, str]]:
    for trial in trials:
        took = "" if trial.seconds is None else f", next step after {trial.seconds:.1f} s"
        mark = "ok  " if trial.passed else "FAIL"
        line = f"{time.strftime('%H:%M:%S')} {mark} {kind}: {trial.what}: {trial.found}{took}"
        print(line)
        yield trial, line


def write_page(path: Path, summaries: Sequence[Summary], *, seed: int, machine: str) -> None:
    """Write the results so far as a Markdown page: a table, then the log."""
    rows = "\n".join(summary.row for summary in summaries)
    log = "\n".join(line for summary in summaries for line in summary.lines)
    path.write_text(
        f"""# Soak test

`make soak` ran these fault-injection trials and wrote this page
(seed {seed}, {time.strftime("%Y-%m-%d")}, {machine}).

| trials | passed | time from the fault to the next step |
| --- | --- | --- |
{rows}

## Log

```
{log}
```
""",
        encoding="utf-8",
    )
