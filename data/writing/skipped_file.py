"""`skipped.jsonl` of shards that are being written: what is not in them, by name, across kills.

The lines of a shard are on disk before the shard is finished. The next run keeps those of finished
shards and drops the others, whose samples are rendered again.
"""

import json
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

from data.aside import commit, explained, flush
from data.skipped import SKIPPED, Skipped, to_lines


class SkippedFile:
    """The file in `folder`; made only once something is skipped.

    ignored: what the source did not even try to render; finished: shards of earlier runs. `last` is
    the last sample skipped in this run.
    """

    def __init__(
        self, folder: Path, *, ignored: Iterable[Skipped], finished: Container[str]
    ) -> None:
        self.path = folder / SKIPPED
        self.last: Skipped | None = None
        kept = [line for line in self._lines() if _shard(line) in finished]
        self._write([*to_lines(ignored).splitlines(keepends=True), *kept])

    def add(self, shard: str, skipped: Sequence[Skipped]) -> None:
        """Name samples that are not in `shard`; call it before the shard is finished."""
        if not skipped:
            return
        self.last = skipped[-1]
        with explained(self.path), self.path.open("ab") as file:
            file.write(to_lines(skipped, shard=shard))
            flush(file)

    def finish(self) -> None:
        """Put the lines in the order of the shards, which a resumed run does not write in order."""
        self._write(sorted(self._lines(), key=lambda line: _shard(line) or ""))

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            commit(self.path, b"".join(lines))
        else:
            self.path.unlink(missing_ok=True)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []


def _shard(line: bytes) -> str | None:
    """The shard that a line is about; None for other lines and for one cut off by a kill."""
    try:
        return str(json.loads(line)["shard"])
    except (ValueError, KeyError):
        return None
