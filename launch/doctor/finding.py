"""What a check of the doctor found: one line, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """`found` says what is so; a warning's or an error's `remedy` says what to do about it."""

    level: Level
    topic: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.remedy), "a remedy for all that is not ok"


def ok(topic: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, found)


def warning(topic: str, found: str, remedy: str) -> Finding:
    """Training starts, and may be slow, or fail later or elsewhere."""
    return Finding("warning", topic, found, remedy)


def error(topic: str, found: str, remedy: str) -> Finding:
    """Training does not start, or would lose something."""
    return Finding("error", topic, found, remedy)


def in_gib(num_bytes: float) -> str:
    """`1.5 GiB`; below that `200 MiB`."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{num_bytes / 2**20:,.0f} MiB"
