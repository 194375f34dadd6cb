"""Sources of record files and Parquet tables."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, shown, silent
from data.option import Argument, Option, Supplied
from data.processes import over_jobs
from data.shards.split_names import split_name
from data.sources.first_pass import FirstPassSource, in_chunks
from data.sources.input_files import Input
from data.sources.records import AnyFile, Fields, Record, open_records, text_field
from data.sources.rows import Batch, Row, gather
from data.sources.source import STRICT, HeldOutByHash


@dataclass(frozen=True, config=STRICT)
class RecordSource(FirstPassSource, HeldOutByHash):
    """A source of record files or Parquet tables. This process reads the records, and several
    processes parse them.
    """

    files: Annotated[
        tuple[Input, ...],
        Argument(),
        Field(description=".csv, .tsv, .jsonl or .parquet files, or .txt with one text per line"),
    ]
    work: Annotated[Path, Supplied()]
    split: str | None = Field(
        default=None,
        kw_only=True,
        description="column that contains the split; default: --test-fraction is held out",
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

    def without_splits(self) -> str | None:
        return None if self.split is not None else "there is no --split"

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
