"""The base class of sources that read their files twice: the first pass selects rows
(`data/sources/selection.py`), and the second writes them.
"""

import hashlib
import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from data.messages import Report, silent
from data.remote.input_path import InputPath
from data.shards.hierarchy import PATH
from data.shards.manifest import ClassInfo
from data.shards.split_names import renamed_splits, shard_splits
from data.sources.names import spelling_notes
from data.sources.selection import (
    Row,
    Rules,
    Selected,
    SelectionFolder,
    Span,
    Task,
    read_spans,
)
from data.sources.source import Source


class FirstPassSource(Source):
    """A source whose first pass stores its result in `work` and reports its progress."""

    reads_first = True

    files: Sequence[InputPath]
    work: Path
    workers: int | None
    ray: str | None
    report: Report

    @abstractmethod
    def rules(self) -> Rules:
        """Return the rules for selecting classes and handling duplicates."""

    @abstractmethod
    def spans(self) -> list[Span]: ...

    @abstractmethod
    def rows(self, span: Span, counts: Counter[str]) -> Iterator[Row]: ...

    def classes(self) -> tuple[ClassInfo, ...]:
        paths = self._selected.paths
        return tuple(
            ClassInfo(name=name, attributes={PATH: paths[name]} if name in paths else {})
            for name in self._selected.labels
        )

    def splits(self) -> dict[str, Sequence[Task]]:
        folder = SelectionFolder(self.work)
        in_shards = shard_splits(self._selected.splits)
        return {in_shards[split]: folder.tasks(split) for split in self._selected.splits}

    def notes(self) -> list[str]:
        """Return one line for each item that was skipped, found or renamed.

        Call this after the first pass.
        """
        names = [info.name for info in self.classes()]
        notes = self._selected.notes() + renamed_splits(self._selected.splits)
        return notes + spelling_notes(self._selected.spellings, names)

    def clean_up(self) -> None:
        """Delete the results of the first pass."""
        SelectionFolder(self.work).remove()

    @cached_property
    def _selected(self) -> Selected:
        # Include the absolute paths in order, because rows identify files by their position in the
        # list.
        files = [str(path.resolve()) for path in self.files]
        about = json.dumps([self.describe().model_dump(), files])
        rules = self.rules()
        return SelectionFolder(self.work).select(
            about,
            rules,
            lambda done: read_spans(
                self,
                rules.test_fraction,
                done,
                workers=self.workers,
                ray=self.ray,
                report=self.report,
            ),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Workers need neither the result of the first pass nor the progress callback.
        return {**super().__getstate__(), "report": silent}


def work_folder(out: Path | str) -> Path:
    """Return the local folder for the result of the first pass of shards at a path or URL."""
    if isinstance(out, Path):
        out = Path(os.path.abspath(out))  # `.` has no name
        return out.with_name(f"{out.name}.first-pass")
    # Folders in different buckets may have the same name.
    digest = hashlib.sha256(out.encode()).hexdigest()[:8]
    return Path(f"{out.rpartition('/')[2]}-{digest}.first-pass")
