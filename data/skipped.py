"""Files and samples that were not written to the shards, each with its name and a reason.

`skipped.jsonl`, next to the shards, lists all of them, one JSON object per line. `repaired.jsonl`
lists the samples that were written after a repair, in the same format. The commands print only a
few.
"""

import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from data.files import commit, explained, flush
from data.messages import printable

SKIPPED = "skipped.jsonl"
REPAIRED = "repaired.jsonl"
_NAMED = 5


class Skipped(NamedTuple):
    """A skipped or repaired item: a path, or a shard and the key of a sample in it."""

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


class SkippedFile:
    """`skipped.jsonl` or `repaired.jsonl`. The file is created only if there is something to list.

    ignored: the files that the source does not read. finished: the shards of earlier runs, whose
    lines are preserved. `last` is the last sample added in this run.
    """

    def __init__(
        self, path: Path, *, finished: Container[str], ignored: Iterable[Skipped] = ()
    ) -> None:
        self.path = path
        self.last: Skipped | None = None
        kept = [line for line in self._lines() if _shard(line) in finished]
        self._write([*to_lines(ignored).splitlines(keepends=True), *kept])

    def add(self, shard: str, skipped: Sequence[Skipped]) -> None:
        """Record samples that are missing from `shard`, or that were repaired for it.

        Call this before the shard is finished.
        """
        if not skipped:
            return
        self.last = skipped[-1]
        with explained(self.path), self.path.open("ab") as file:
            file.write(to_lines(skipped, shard=shard))
            flush(file)

    def finish(self) -> None:
        """Sort the lines by shard, because a resumed run does not write shards in order."""
        self._write(sorted(self._lines(), key=lambda line: _shard(line) or ""))

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            commit(self.path, b"".join(lines))
        else:
            self.path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []


def _shard(line: bytes) -> str | None:
    """Return the shard in a line, or None if there is no shard or the line is truncated."""
    try:
        return str(json.loads(line)["shard"])
    except (ValueError, KeyError):
        return None
