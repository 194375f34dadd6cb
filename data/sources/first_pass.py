"""The base class of sources that read their input twice: the first pass selects labeled rows and
determines duplicates, classes, order and splits; the second writes them.

60 bytes about each row are inserted into a DuckDB database, which groups and sorts on disk, so
memory use does not grow with the number of rows. Every query that depends on an order states it.
"""

import hashlib
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

import duckdb
import numpy as np

from data.classes.class_list import ClassInfo
from data.messages import Report, shown, silent
from data.shards.hierarchy import PATH, SEPARATOR, join_path
from data.shards.split_names import TEST, TRAIN, renamed_splits, shard_splits
from data.sources.names import spelling_notes
from data.sources.rows import (
    COLUMNS,
    FIRST_DAMAGED,
    LABEL_OF_SET,
    TASK,
    TASK_OF_SET,
    Batch,
    Row,
    Task,
    Tasks,
    gather,
)
from data.sources.source import Source
from data.tars.labels import label_order

_CONTENTS, _LABELS = "contents", "labels"
_CHUNK_BYTES, _CHUNK_ROWS = 8 << 20, 10_000
_FETCHED = 100_000
# Each thread needs memory to sort.
_DUCKDB = {"memory_limit": "1GB", "threads": 4, "preserve_insertion_order": False}

T = TypeVar("T")


@dataclass
class Selected:
    """The result of the first pass. splits: the tasks of the splits that have samples. spellings:
    the spellings of the labels that have several. paths: the hierarchy above each label that has
    one. counts: a map from readable descriptions to numbers.
    """

    labels: list[str]
    splits: dict[str, Tasks]
    spellings: dict[str, list[str]]
    paths: dict[str, str]
    counts: Counter[str]


class FirstPassSource(Source):
    """A source whose first pass stores its result in `work` and reports its progress.

    duplicates: whether to keep only the first of several rows with the same content, label and
    split. across: whether to remove training rows whose content also occurs in another split.
    has_sets: whether the samples have sets of labels.
    """

    reads_first = True
    has_sets = False

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
        """The result of the first pass. A folder that a killed command left behind is replaced.

        Raises ValueError for an unrelated folder, a broken rule, and if no classes remain.
        """
        folder = self.work
        if folder.exists():
            if any(folder.iterdir()) and not (folder / _CONTENTS).is_file():
                raise ValueError(
                    f"{folder} contains unrelated files: choose another folder for the shards"
                )
            rmtree(folder)
        folder.mkdir(parents=True)
        config: dict[str, Any] = {**_DUCKDB, "temp_directory": str(folder / "sorting")}
        with duckdb.connect(str(folder / "rows.duckdb"), config=config) as rows:
            counts = _store(rows, self.batches(), folder / _CONTENTS)
            rows.execute(f"CREATE VIEW labels AS {_OF_SETS if self.has_sets else _OF_ROWS}")
            noun = "texts"
            if self.modality != "text":
                noun = "images"
                _check_one_label(rows, self.where)
            spellings = rows.execute(
                "SELECT label, list_sort(list(DISTINCT spelling)) FROM labels GROUP BY label"
                " HAVING count(DISTINCT spelling) > 1 ORDER BY label"
            ).fetchall()
            for what, action, condition in (
                ("duplicates", self.duplicates, _DUPLICATE),
                (f"training {noun} that also occur in another split,", self.across, _ACROSS),
            ):
                is_dropped = action == "drop"
                query = "DELETE" if is_dropped else "SELECT count(*)"
                found = rows.execute(f"{query} FROM rows WHERE {condition}").fetchall()
                counts[f"{what} {'dropped' if is_dropped else 'kept'}"] += int(found[0][0])
            samples, trained = Counter[str](), Counter[str]()
            for label, number, in_train in rows.execute(
                "SELECT label, count(*), count(*) FILTER (split = 'train') FROM labels"
                " GROUP BY label ORDER BY label"
            ).fetchall():
                samples[label], trained[label] = number, in_train
            labels = self.choose(samples, +trained)
            if excluded := samples.total() - sum(samples[name] for name in labels):
                counts[f"{'labels' if self.has_sets else 'samples'} of excluded classes"] = excluded
            splits = _write_tasks(rows, labels, folder, self.has_sets)
            counts["samples without labels"] = sum(
                tasks.num_unlabeled() for tasks in splits.values()
            )
            return Selected(labels, splits, dict(spellings), _paths(rows), counts)

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


# The labels of each row. A set of labels has one per line.
_OF_ROWS = "SELECT rowid AS row, label, spelling, split FROM rows"
_OF_SETS = (
    "SELECT rowid AS row, unnest(string_split(label, chr(10))) AS label,"
    " unnest(string_split(spelling, chr(10))) AS spelling, split FROM rows WHERE label != ''"
)
_DUPLICATE = (
    "rowid IN (SELECT rowid FROM rows QUALIFY row_number() OVER"
    " (PARTITION BY high, low, label, split ORDER BY file, position) > 1)"
)
_ACROSS = (
    "split = 'train' AND EXISTS (SELECT 1 FROM rows AS other WHERE other.high = rows.high"
    " AND other.low = rows.low AND other.split != 'train')"
)


def _store(rows: duckdb.DuckDBPyConnection, batches: Iterable[Batch], path: Path) -> Counter[str]:
    """Insert the rows, append their contents to the file `path`, and return the total counts."""
    rows.execute(
        "CREATE TABLE rows (high UBIGINT, low UBIGINT, label VARCHAR, spelling VARCHAR,"
        " split VARCHAR, path VARCHAR, file UINTEGER, position UBIGINT, start UBIGINT,"
        " size UINTEGER, key_size UINTEGER)"
    )
    counts = Counter[str]()
    with path.open("wb") as contents:
        for columns, data, counted, _ in batches:
            counts.update(counted)
            if len(columns["start"]):
                columns["start"] += np.uint64(contents.tell())
                contents.write(data)
                rows.execute(f"INSERT INTO rows SELECT {', '.join(COLUMNS)} FROM columns")
    return counts


def _check_one_label(rows: duckdb.DuckDBPyConnection, where: Callable[[int, int], str]) -> None:
    """Raise ValueError with the first rows that have the same content and different labels."""
    found = rows.execute(
        "SELECT high, low FROM rows GROUP BY high, low HAVING min(label) != max(label)"
        " ORDER BY min((file::UHUGEINT << 64) + position) LIMIT 1"
    ).fetchone()
    if found is None:
        return
    (*one, label), (*other, other_label) = rows.execute(
        "SELECT file, position, label FROM rows WHERE high = ? AND low = ?"
        " QUALIFY row_number() OVER (PARTITION BY label ORDER BY file, position) = 1"
        " ORDER BY file, position LIMIT 2",
        list(found),
    ).fetchall()
    raise ValueError(
        f"{where(*one)} and {where(*other)}: the same image has the labels "
        f"{_shown(label)} and {_shown(other_label)}: remove one of them"
    )


def _write_tasks(
    rows: duckdb.DuckDBPyConnection, labels: list[str], folder: Path, has_sets: bool
) -> dict[str, Tasks]:
    """Write the tasks of each split that has some, in the order of their hashes."""
    classes = {"label": np.array(labels, object), "number": np.arange(len(labels))}  # noqa: F841
    rows.execute("CREATE TEMP TABLE classes AS SELECT * FROM classes")
    given = [name for (name,) in rows.execute("SELECT DISTINCT split FROM rows").fetchall()]
    query = "SELECT start, size, key_size, number FROM rows JOIN classes USING (label)"
    files: tuple[Path, ...] = (folder / _CONTENTS,)
    if has_sets:
        query = (
            "SELECT start, size, key_size, coalesce(numbers, []) FROM rows LEFT JOIN"
            " (SELECT row, list(number ORDER BY number) AS numbers FROM labels JOIN classes"
            " USING (label) GROUP BY row) ON rows.rowid = row"
        )
        files = (folder / _CONTENTS, folder / _LABELS)
    paths, num_labels = [], 0
    with (folder / _LABELS).open("wb") as labels_file:
        for split in [TRAIN, TEST, *sorted(set(given) - {TRAIN, TEST})]:
            order = "ORDER BY high, low, label, file, position"
            rows.execute(f"{query} WHERE split = ? {order}", [split])
            path = folder / f"{split}.tasks"
            with path.open("wb") as file:
                while found := rows.fetchmany(_FETCHED):
                    if has_sets:
                        sets = [numbers for *_, numbers in found]
                        *firsts, num_labels = np.cumsum([num_labels, *map(len, sets)]).tolist()
                        np.fromiter(chain.from_iterable(sets), LABEL_OF_SET).tofile(labels_file)
                        parts = zip(found, firsts, strict=True)
                        found = [(*row[:3], first, len(row[3])) for row, first in parts]
                    np.array(found, TASK_OF_SET if has_sets else TASK).tofile(file)
            if path.stat().st_size:
                paths.append((split, path))
    return {split: Tasks(path, *files) for split, path in paths}


def _shown(label: str) -> str:
    """Show a label, or a set of labels."""
    return shown(label.replace("\n", ", "))


def _paths(rows: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Return the hierarchy of each label. Raises ValueError for a label with two, and for invalid
    names.
    """
    found = rows.execute(
        "SELECT label, min(path), max(path) FROM rows GROUP BY label HAVING max(path) != ''"
        " ORDER BY label"
    ).fetchall()
    for label, one, other in found:
        if one != other:
            raise ValueError(
                f"class {shown(label)} has two hierarchies, {shown(one)} and {shown(other)}: write "
                f"one {PATH} per class"
            )
        join_path(one.split(SEPARATOR))
    return {label: path for label, path, _ in found}


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
