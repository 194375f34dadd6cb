"""Files and samples that were not written to the shards, each with its name and a reason.

`skipped.jsonl`, next to the shards, lists all of them, one JSON object per line. While the
shards are being written, each shard has its own list. The commands print only a few.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

from data.messages import printable

SKIPPED = "skipped.jsonl"
_NAMED = 5


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
    return [f"skipped {_some(found)}: {reason}" for reason, found in names.items()]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def list_of_shard(shard: str) -> str:
    """Return the file that lists the skipped samples of one shard until all shards have been
    written: `train-000000.skipped.jsonl` for `train-000000.tar`.
    """
    return f"{shard.removesuffix('.tar')}.{SKIPPED}"


def by_shard(lines: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Group the lines of `skipped.jsonl` by shard. Lines without a shard and truncated lines are
    omitted.
    """
    found: dict[str, list[bytes]] = {}
    for line in lines:
        try:
            found.setdefault(str(json.loads(line)["shard"]), []).append(line)
        except (ValueError, KeyError):
            continue
    return found
