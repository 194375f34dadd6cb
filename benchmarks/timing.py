"""Time contenders in turn, and report the ratios of their times.

Because they take turns, all contenders are exposed to the same load on the machine. Ratios are
computed within each round, and their median over rounds is reported. Any row of a report can have a
target.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

_FILE_COLUMNS = 10_000


def _console() -> Console:
    """Return a console that prints one line per row if the output is a file.

    For files, rich assumes 80 columns and wraps or truncates cells.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


CONSOLE = _console()


@dataclass(frozen=True)
class Row:
    """One line of a report: what was measured, in which case, the result, and its target."""

    what: str
    case: str
    measured: str = ""
    target: str = ""
    details: str = ""


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    title: str,
    rounds: int = 9,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Return the seconds that each contender took in each round, as measured by `clock`.

    There is one warm-up round. The measurement stops early if another round would exceed the limit
    of `seconds`, but at least one round is completed.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    began = 0.0
    for done in track(range(-1, rounds), title, console=Console(stderr=True), transient=True):
        if done == 0:
            began = time.perf_counter()
        elapsed = time.perf_counter() - began
        if done > 0 and elapsed * (done + 1) / done > seconds:
            break
        for name, contender in contenders.items():
            started = clock()
            contender()
            if done >= 0:
                found[name].append(clock() - started)
    return {name: np.array(times) for name, times in found.items()}


def ratio_row(
    what: str, case: str, ours: np.ndarray, theirs: np.ndarray, at_most: float | None = None
) -> Row:
    """Return a row with the median ratio of `ours` / `theirs`, its quartiles, and both medians."""
    low, middle, high = np.quantile(ours / theirs, [0.25, 0.5, 0.75])
    times = " / ".join(f"{1e3 * np.median(seconds):,.1f}" for seconds in (ours, theirs))
    return Row(
        what,
        case,
        f"{middle:.2f}",
        "" if at_most is None else f"<= {at_most:.2f}",
        f"{times} ms, quartiles {low:.2f}-{high:.2f} of {len(ours)}",
    )


def rate_row(
    what: str,
    case: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    at_least: float | None,
    count: int,
    unit: str,
) -> Row:
    """Return a row with the median ratio of the rates, `ours` / `theirs`.

    `count` items, such as images, are processed per round.
    """
    low, middle, high = np.quantile(theirs / ours, [0.25, 0.5, 0.75])
    rates = " / ".join(f"{count / np.median(seconds):,.0f}" for seconds in (ours, theirs))
    return Row(
        what,
        case,
        f"{middle:.2f}",
        "" if at_least is None else f">= {at_least:.2f}",
        f"{rates} {unit}, quartiles {low:.2f}-{high:.2f} of {len(ours)}",
    )


def share_row(
    what: str, case: str, part: np.ndarray, whole: np.ndarray, *, count: int, unit: str
) -> Row:
    """Return a row with the share of a part of the loader's work, such as its checks, in its CPU
    time. `count` items are processed per round.
    """
    each = 1e6 * np.median(part) / count
    return Row(
        f"{what} / loader, CPU time",
        case,
        f"{np.median(part / whole):.1%}",
        details=f"{each:.1f} µs per {unit}",
    )


def print_rows(rows: Sequence[Row]) -> None:
    table = Table("what", "case", "measured", "target", "details", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.what, row.case, row.measured, row.target, row.details)
    CONSOLE.print(table)


def write_markdown(path: Path, header: str, rows: Sequence[Row]) -> None:
    """Write the table as Markdown for the docs, below `header`, which describes the machine."""
    table = [("what", "case", "measured", "target", "details"), ("---",) * 5]
    table += [(row.what, row.case, row.measured, row.target, row.details) for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    path.write_text("\n".join([header, "", *lines, ""]), encoding="utf-8")
