"""Reads `metrics.jsonl` into columns of numbers and a list of events.

Invalid lines, such as the truncated last line of a killed run, are counted and skipped.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# Limits for untrusted files. Fields and events beyond them are ignored.
_MAX_FIELDS = 200
_MAX_EVENTS = 10_000


@dataclass(frozen=True)
class Event:
    """An event at a step. `values`: the numbers and strings recorded with it."""

    name: str
    step: int
    time: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Steps:
    """Logged steps as float64 columns [n] by name (`loss`, `phases.data`), NaN where missing."""

    columns: dict[str, np.ndarray] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    unreadable: int = 0

    def __len__(self) -> int:
        return len(self.column("step"))

    def column(self, name: str) -> np.ndarray:
        length = len(self.columns["step"]) if "step" in self.columns else 0
        return self.columns.get(name, np.full(length, np.nan))

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """The columns named `prefix.…`, keyed by the rest of their names."""
        start = f"{prefix}."
        return {
            name.removeprefix(start): column
            for name, column in self.columns.items()
            if name.startswith(start)
        }

    def of(self, event: str) -> list[Event]:
        return [found for found in self.events if found.name == event]


def read_steps(path: Path) -> Steps:
    """Read the records in a file. The result is empty if the file does not exist."""
    columns: dict[str, array[float]] = {"step": array("d")}
    events: list[Event] = []
    unreadable = 0
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                record = _parsed(line)
                if record is None:
                    unreadable += 1
                elif record["event"] == "step":
                    _add(columns, dict(_numbers(record)))
                elif len(events) < _MAX_EVENTS:
                    events.append(_event(record))
    return Steps(
        {name: np.array(values) for name, values in columns.items()}, tuple(events), unreadable
    )


def _parsed(line: str) -> dict[str, Any] | None:
    """The record in this line, or None if its step or event name is missing or invalid."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(record, dict) and isinstance(record.get("event"), str)):
        return None
    step = record.get("step")
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53
    return record if is_step else None


def _add(columns: "dict[str, array[float]]", numbers: dict[str, float]) -> None:
    length = len(columns["step"])
    for name in numbers:
        if name not in columns and len(columns) < _MAX_FIELDS:
            columns[name] = array("d", [np.nan]) * length
    for name, column in columns.items():
        column.append(numbers.get(name, np.nan))


def _numbers(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}.")
        elif (number := as_number(value)) is not None:
            yield f"{prefix}{name}", number


def as_number(value: Any) -> float | None:
    """A JSON number as a float, or None for other values and integers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _event(record: dict[str, Any]) -> Event:
    values = {name: record[name] for name in record if name not in ("event", "step", "time")}
    time = as_number(record.get("time"))
    return Event(record["event"], record["step"], np.nan if time is None else time, values)
