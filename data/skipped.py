"""Files and samples that were not written to the shards, each with its name and a reason.

`skipped.jsonl`, next to the shards, lists all of them, one JSON object per line. The index
of a shard contains its own list, so that it is not lost if the command is interrupted. The commands
print only a few.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from data.messages import printable

SKIPPED = "skipped.jsonl"
NAMED = 10
"""The number of skipped samples that a command prints."""


class Skipped(NamedTuple):
    """A skipped item: a path, or a shard and the key of a sample in it."""

    name: str
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.reason}")


def to_lines(skipped: Iterable[Skipped], **fields: str) -> bytes:
    """Return a JSON line for each item, with `fields` added.

    The lines are ASCII, because names may not be valid UTF-8.
    """
    lines = [json.dumps({**fields, **one._asdict()}) + "\n" for one in skipped]
    return "".join(lines).encode("ascii")


def by_reason(skipped: Iterable[Skipped]) -> list[str]:
    """Return one line for each reason, with the names of the first items."""
    names: dict[str, list[str]] = {}
    for one in skipped:
        names.setdefault(one.reason, []).append(one.name)
    lines = []
    for reason, found in names.items():
        more = f" and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
        lines.append(f"skipped {', '.join(map(repr, found[:NAMED]))}{more}: {reason}")
    return lines
