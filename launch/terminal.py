"""Terminal output of the commands: progress, consoles, table cells and durations."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from data.messages import printable
from data.progress import Rate, Report, plain_lines

_CELL_LENGTH = 40


@contextmanager
def progress(verb: str, unit: str = "samples") -> Iterator[Report]:
    """Yield `report(done, total)`, which shows progress, rate and remaining time on stderr.

    The bar is visible from the first report until `done` reaches `total`, so that the bar of an
    earlier stage can be shown first.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield plain_lines(verb, unit)
        return
    columns = (
        TextColumn(verb),
        BarColumn(),
        DownloadColumn() if unit == "bytes" else MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(verb, total=None, rate="")
    rate = Rate()

    def report(done: int, total: int) -> None:
        speed = rate.of(done)
        shown = f"{speed / 1e6:,.1f} MB/s" if unit == "bytes" else f"{speed:,.0f} {unit}/s"
        bar.update(task, completed=done, total=total, rate=shown)
        if done < total:
            bar.start()
        else:
            bar.stop()

    try:
        yield report
    finally:
        bar.stop()


def wide_console(columns: int) -> Console:
    """Return a console. Without a terminal, its width is `columns`, because tables would otherwise
    wrap at rich's default of 80.
    """
    console = Console()
    return console if console.is_terminal else Console(width=columns)


def seconds_since(started: float) -> str:
    """Time elapsed since a `time.monotonic()` reading, such as `12.3 s`."""
    return f"{time.monotonic() - started:.1f} s"


def table_cell(text: str, length: int = _CELL_LENGTH) -> Text:
    """Return `text` as a printable cell of at most `length` characters.

    Whitespace is collapsed, and markup is not interpreted.
    """
    safe = printable(" ".join(text.split()))
    return Text(safe if len(safe) <= length else safe[: length - 1] + "…")
