"""The base classes of sources that read their input twice: the first pass selects rows
(`data/sources/selection.py`), and the second writes them.
"""

import hashlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.input_path import Input
from data.messages import Report, shown, silent
from data.option import Argument, Option, Supplied
from data.processes import over_jobs
from data.shards.hierarchy import PATH
from data.shards.split_names import renamed_splits, shard_splits, split_name
from data.sources.names import spelling_notes
from data.sources.records import AnyFile, Fields, Record, open_records, text_field
from data.sources.selection import (
    FIRST_DAMAGED,
    Batch,
    Row,
    Selected,
    Task,
    gather,
    select,
)
from data.sources.source import STRICT, Source
from data.tars.labels import label_order

_CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 10_000

T = TypeVar("T")


class FirstPassSource(Source):
    """A source whose first pass stores its result in `work` and reports its progress."""

    reads_first = True

    work: Path
    report: Report
    test_fraction: float
    min_count = 1
    duplicates = across = "keep"  # or "drop"
    needs_training = True  # a class without training samples is an error, not excluded

    def rows(self) -> Iterator[Row]:
        """Yield all rows, unless `batches` does."""
        raise NotImplementedError

    def batches(self) -> Iterator[Batch]:
        """Yield all rows in batches."""
        for rows in in_chunks(self.rows(), lambda row: len(row.content)):
            yield gather(rows, self.test_fraction, Counter())

    @abstractmethod
    def where(self, file: int, position: int) -> str:
        """Describe the location of a row for errors."""

    @property
    def input(self) -> object:
        """What the source reads, for errors."""
        return "the samples"

    def choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the classes: the labels with enough samples, of which one is a training sample.

        They are sorted by number if all labels are numbers, otherwise by name.
        """
        names = [name for name in samples if samples[name] >= self.min_count]
        if self.needs_training and (untrained := sorted(set(names) - trained.keys())):
            raise ValueError(
                f"{self.input}: class {shown(untrained[0])} has no training samples: add some, "
                "remove the class, or lower the fraction of test samples"
            )
        names = [name for name in names if trained[name]]
        if len(names) < 2:
            raise ValueError(
                f"{self.input}: found {len(names)} classes with training samples and at least "
                f"{self.min_count} samples in total, but at least 2 are required: check the labels"
            )
        return label_order(names)

    @cached_property
    def _selected(self) -> Selected:
        return select(
            self.work,
            self.batches(),
            choose=self.choose,
            where=self.where,
            drop_duplicates=self.duplicates == "drop",
            drop_across=self.across == "drop",
            is_text=self.modality == "text",
        )

    def classes(self) -> tuple[ClassInfo, ...]:
        paths = self._selected.paths
        return tuple(
            ClassInfo(name=name, attributes={PATH: paths[name]} if name in paths else {})
            for name in self._selected.labels
        )

    def splits(self) -> dict[str, Sequence[Task]]:
        found = self._selected.splits
        in_shards = shard_splits(found)
        return {in_shards[split]: tasks for split, tasks in found.items()}

    def notes(self) -> list[str]:
        """Return one line for each item that was skipped, found or renamed.

        Call this after the first pass.
        """
        found = self._selected
        counted = [f"{what}: {count:,}" for what, count in (+found.counts).items()]
        # Each batch counts its first damaged record.
        damaged = [what for what in found.counts if what.startswith(FIRST_DAMAGED)][:1]
        counted = [note for note in counted if not note.startswith(FIRST_DAMAGED)] + damaged
        spellings = spelling_notes(found.spellings, found.labels)
        return counted + renamed_splits(found.splits) + spellings

    def clean_up(self) -> None:
        """Delete the results of the first pass."""
        rmtree(self.work, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        # Workers need neither the result of the first pass nor the progress callback.
        return {**super().__getstate__(), "report": silent}


@dataclass(frozen=True, config=STRICT)
class RecordSource(FirstPassSource):
    """A source of record files or Parquet tables. This process reads the records, and several
    processes parse them.
    """

    files: Annotated[
        tuple[Input, ...],
        Argument(),
        Field(description=".csv, .tsv, .jsonl or .parquet files, or .txt with one text per line"),
    ]
    work: Annotated[Path, Supplied()]
    # For inherited fields, pydantic reads `kw_only` from each field, not from the decorator.
    split: str | None = Field(
        default=None,
        kw_only=True,
        description="column that contains the split; default: --test-fraction is held out",
    )
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        kw_only=True,
        description="fraction of rows to hold out, chosen by a hash of the text or image",
    )
    across: Annotated[Literal["drop", "keep"], Option("--drop-across", flag="drop")] = Field(
        default="keep",
        kw_only=True,
        description="drop training rows that also occur in another split",
    )
    min_count: int = Field(
        default=1, ge=1, kw_only=True, description="minimum number of rows per class"
    )
    workers: Annotated[int | None, Supplied()] = Field(default=None, kw_only=True)
    report: Annotated[Report, Supplied()] = field(
        default=silent, kw_only=True, compare=False, repr=False
    )

    @property
    def columns(self) -> Sequence[str]:
        """The columns of a Parquet table to read; by default, all."""
        return ()

    @abstractmethod
    def row(
        self, number: int, file: AnyFile, record: Record, counts: Counter[str]
    ) -> Iterator[Row]:
        """Yield the labeled rows of a record of file `number`, or count the record in `counts` by
        the reason why it has none.
        """

    @property
    def input(self) -> object:
        return self.files[0] if len(self.files) == 1 else f"{self.files[0]} and others"

    def where(self, file: int, position: int) -> str:
        return self._opened[file].where(position)

    def announcement(self) -> str | None:
        if self.split is not None or not self.test_fraction:
            return None
        return (
            f"random split, because there is no --split: {self.test_fraction:.0%} of the rows "
            "become `test`"
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
    def _opened(self) -> list[AnyFile]:
        return [open_records(path) for path in self.files]

    def batches(self) -> Iterator[Batch]:
        total = sum(path.stat().st_size for path in self.files)
        chunks = (
            (number, file, chunk)
            for number, file in enumerate(self._opened)
            for chunk in in_chunks(file.records(self.columns), lambda record: record.size)
        )
        done = 0
        work = partial(_parsed, self)
        for batch in over_jobs(work, chunks, total_bytes=total, workers=self.workers):
            yield batch
            done += batch.size
            self.report(done, total)


def _parsed(source: RecordSource, chunk: tuple[int, AnyFile, list[Record]]) -> Batch:
    number, file, records = chunk
    counts = Counter[str]()
    rows = (row for record in records for row in source.row(number, file, record, counts))
    return gather(rows, source.test_fraction, counts, sum(record.size for record in records))


def in_chunks(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide items into lists of a limited length and size in bytes."""
    chunk: list[T] = []
    num_bytes = 0
    for one in items:
        chunk.append(one)
        num_bytes += size(one)
        if len(chunk) == _CHUNK_ROWS or num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def work_folder(out: Path | str) -> Path:
    """Return the local folder for the result of the first pass of shards at a path or URL."""
    if isinstance(out, Path):
        out = Path(os.path.abspath(out))  # `.` has no name
        return out.with_name(f"{out.name}.first-pass")
    # Folders in different buckets may have the same name.
    digest = hashlib.sha256(out.encode()).hexdigest()[:8]
    return Path(f"{out.rpartition('/')[2]}-{digest}.first-pass")
