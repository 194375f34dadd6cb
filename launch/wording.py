"""Numbers, and names from files, as the commands print them."""

import time

from rich.text import Text

from data.messages import counted, printable

__all__ = ["counted", "plain", "printable", "seconds_since"]

_NAME = 40


def seconds_since(started: float) -> str:
    """Since a `time.monotonic()`: `12.3 s`."""
    return f"{time.monotonic() - started:.1f} s"


def plain(text: str, length: int = _NAME) -> Text:
    """A cell of a table: `printable`, without markup, a space for each gap, cut to `length`."""
    safe = printable(" ".join(text.split()))
    return Text(safe if len(safe) <= length else safe[: length - 1] + "…")
