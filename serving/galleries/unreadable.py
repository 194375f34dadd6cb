"""What stays out of a gallery, and why: written down as it is found, the first few named."""

import json
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from data.aside import flush

_NAMED = 5


class Unreadable(NamedTuple):
    """A file, a folder or a line, by its name in the collection."""

    name: str
    reason: str


class UnreadableFile:
    """Writes `{"name", "reason"}` a line; holds a few of them."""

    def __init__(self, path: Path) -> None:
        self._file, self.count = path.open("wb"), 0
        self.first: list[Unreadable] = []

    def add(self, unreadable: Unreadable) -> None:
        self.count += 1
        if self.count <= _NAMED:
            self.first.append(unreadable)
        self._file.write(json.dumps(unreadable._asdict()).encode() + b"\n")

    def flush(self) -> None:
        flush(self._file)

    def __enter__(self) -> "UnreadableFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()
