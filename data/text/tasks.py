"""Samples to be written, by the place of their records: mapped from disk, never a list."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

TASK = np.dtype([("offset", "<u8"), ("file", "<u4"), ("length", "<u4"), ("label", "<u4")])


class Task(NamedTuple):
    """A sample to write: a record's place, and its label."""

    file: int
    offset: int
    length: int
    label: int


class TaskFile(Sequence[Task]):
    """Tasks of a split, mapped from disk: 20 bytes each."""

    def __init__(self, path: Path) -> None:
        self._rows = np.memmap(path, TASK, "r") if path.stat().st_size else np.empty(0, TASK)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, i: int) -> Task: ...
    @overload
    def __getitem__(self, i: slice) -> list[Task]: ...
    def __getitem__(self, i: int | slice) -> Task | list[Task]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        offset, file, length, label = self._rows[i].item()
        return Task(file, offset, length, label)
