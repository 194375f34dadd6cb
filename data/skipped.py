"""Files and samples that are not in the shards, each with its name and the reason.

`skipped.jsonl`, next to the shards, lists all of them, one JSON object per line; the commands print
only a few.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from data.printable import printable

SKIPPED = "skipped.jsonl"
_NAMED = 5


class Skipped(NamedTuple):
    """What was skipped: a path, or a shard and a key in it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason}")


def to_lines(skipped: Iterable[Skipped], **fields: str) -> bytes:
    """A JSON line for each, with `fields` added; ASCII, because names may not be valid UTF-8."""
    lines = [json.dumps({**fields, **one._asdict()}) + "\n" for one in skipped]
    return "".join(lines).encode("ascii")


def by_reason(skipped: Iterable[Skipped]) -> list[str]:
    """One line for each reason, with the first names."""
    names: dict[str, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reason, []).append(one.name)
    return [f"skipped {_some(found)}: {reason}" for reason, found in names.items()]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
