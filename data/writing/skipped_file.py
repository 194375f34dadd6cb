"""`skipped.jsonl` of shards that are being written: the names of samples that are not in them.

It survives a kill: the lines of a shard are on disk before the shard is finished. The next run
keeps the lines of finished shards and drops the others, whose samples it renders again.
"""

import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from data.aside import commit, explained, flush
from data.skipped import SKIPPED, Skipped, to_lines


class SkippedFile:
    """The file in `folder`; created only once something is skipped.

    ignored: files that the source does not read; finished: shards of earlier runs. `last` is the
    last sample skipped in this run.
    """

    def __init__(
        self, folder: Path, *, ignored: Iterable[Skipped], finished: Container[str]
    ) -> None:
        self.path = folder / SKIPPED
        self.last: Skipped | None = None
        kept = [line for line in self._lines() if _shard(line) in finished]
        self._write([*to_lines(ignored).splitlines(keepends=True), *kept])

    def add(self, shard: str, skipped: Sequence[Skipped]) -> None:
        """Record samples that are not in `shard`; call it before the shard is finished."""
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
    """The shard of a line; None for lines without one and for a line truncated by a kill."""
    try:
        return str(json.loads(line)["shard"])
    except (ValueError, KeyError):
        return None
