"""The base classes of sources that read their input twice: the first pass selects rows
(`data/sources/selection.py`), and the second writes them.
"""

import hashlib
import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from data.classes.class_list import ClassInfo
from data.messages import Report, shown, silent
from data.processes import over_jobs
from data.shards.hierarchy import PATH
from data.shards.split_names import renamed_splits, shard_splits, split_name
from data.sources.names import spelling_notes
from data.sources.parquet import PARQUET, ParquetFile
from data.sources.selection import (
    Batch,
    Row,
    Rules,
    Selected,
    SelectionFolder,
    Task,
    gather,
)
from data.sources.source import Source
from data.text.records import Fields, RecordFile, open_records, text_field


class FirstPassSource(Source):
    """A source whose first pass stores its result in `work` and reports its progress."""

    reads_first = True

    work: Path
    report: Report

    @abstractmethod
    def rules(self) -> Rules:
        """Return the rules for selecting classes and handling duplicates."""

    @property
    @abstractmethod
    def _selected(self) -> Selected:
        """The result of the first pass."""

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
        notes = self._selected.notes() + renamed_splits(self._selected.splits)
        return notes + spelling_notes(self._selected.spellings, self._selected.labels)

    def clean_up(self) -> None:
        """Delete the results of the first pass."""
        SelectionFolder(self.work).remove()

    def __getstate__(self) -> dict[str, Any]:
        # Workers need neither the result of the first pass nor the progress callback.
        return {**super().__getstate__(), "report": silent}


class RecordSource(FirstPassSource):
    """A source of record files or Parquet tables, which several processes or Ray tasks read in
    spans. A source is pickled for them.
    """

    files: Sequence[Path]
    split: str | None
    test_fraction: float
    workers: int | None
    ray: str | None

    @abstractmethod
    def rows(self, number: int, first: int, last: int, counts: Counter[str]) -> Iterator[Row]:
        """Yield the labeled rows of a span of file `number`, and count the other records in
        `counts` by reason.
        """

    def _announced(self, what: str, column: str) -> str | None:
        if self.split is not None or not self.test_fraction:
            return None
        return (
            f"random split, because there is no --split: {self.test_fraction:.0%} of the {what}, "
            f"by a hash of {column}, become `test`"
        )

    def _split_of(self, fields: Fields) -> str | None:
        """Return the split of a record. Raises ValueError with the invalid name."""
        if self.split is None:
            return None
        name = (text_field(fields, self.split) or "").strip().lower()
        if not name.isidentifier():
            raise ValueError(
                f"has the split {shown(name)}: use names such as train and test in column "
                f"{self.split!r}"
            )
        return split_name(name)

    def _check_columns(self, names: Sequence[str]) -> None:
        """Raise ValueError for a file without one of the columns `names`."""
        for one in self._opened:
            missing = [name for name in names if name not in (one.columns or names)]
            if missing:
                raise ValueError(
                    f"{one.path}: column {missing[0]!r} does not exist: choose from "
                    f"{', '.join(one.columns or ())[:200]}"
                )

    @cached_property
    def _opened(self) -> list[RecordFile | ParquetFile]:
        return [
            ParquetFile(path) if path.suffix.lower() == PARQUET else open_records(path)
            for path in self.files
        ]

    @cached_property
    def _selected(self) -> Selected:
        # Include the absolute paths in order, because rows identify files by their position in the
        # list.
        files = [str(path.resolve()) for path in self.files]
        about = json.dumps([self.describe().model_dump(), files])
        return SelectionFolder(self.work).select(about, self.rules(), self._batches)

    def _batches(self, done: Collection[int]) -> Iterator[Batch]:
        """Yield a batch for each span whose number is not in `done`, and report bytes."""
        spans = [
            (file, first, last, size)
            for file, one in enumerate(self._opened)
            for first, last, size in one.spans()
        ]
        left = [(number, *span[:3]) for number, span in enumerate(spans) if number not in done]
        total, read = sum(span[3] for span in spans), sum(spans[number][3] for number in done)
        self.report(read, total)
        work = partial(_read_span, self)
        batches = over_jobs(
            work, left, total_bytes=total - read, workers=self.workers, ray=self.ray
        )
        for (number, *_), batch in zip(left, batches, strict=True):
            yield batch
            read += spans[number][3]
            self.report(read, total)


def _read_span(source: RecordSource, job: tuple[int, int, int, int]) -> Batch:
    number, file, first, last = job
    counts = Counter[str]()
    return gather(number, source.rows(file, first, last, counts), source.test_fraction, counts)


def work_folder(out: Path | str) -> Path:
    """Return the local folder for the result of the first pass of shards at a path or URL."""
    if isinstance(out, Path):
        out = Path(os.path.abspath(out))  # `.` has no name
        return out.with_name(f"{out.name}.first-pass")
    # Folders in different buckets may have the same name.
    digest = hashlib.sha256(out.encode()).hexdigest()[:8]
    return Path(f"{out.rpartition('/')[2]}-{digest}.first-pass")
