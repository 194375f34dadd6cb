"""Selects labeled rows in a first pass over the input: duplicates, classes, order and splits.

The content of each row is appended to one file, and 60 bytes about it are inserted into a DuckDB
database, which groups and sorts on disk, so memory use does not grow with the number of rows. Order
and split depend only on a hash of the content, not on DuckDB. Contents with equal 128-bit hashes
are considered identical: the probability of a collision among 5e9 different texts is 4e-20.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import duckdb
import numpy as np

from data.messages import shown
from data.shards.hierarchy import PATH, SEPARATOR, join_path
from data.shards.split_names import TEST, TRAIN

# Keys of counts: the number of damaged records, and a prefix for the location of the first damaged
# record.
DAMAGED = "damaged records"
FIRST_DAMAGED = "first damaged: "
_CONTENTS = "contents"
_MEMORY, _THREADS = "1GB", 4
_FETCHED = 100_000
_TASK = np.dtype([("start", "<u8"), ("size", "<u4"), ("key_size", "<u4"), ("label", "<u4")])
_COLUMNS = {
    "high": np.uint64,
    "low": np.uint64,
    "label": object,
    "spelling": object,
    "split": object,
    "path": object,
    "file": np.uint32,
    "position": np.uint64,
    "start": np.uint64,
    "size": np.uint32,
    "key_size": np.uint32,
}


class Row(NamedTuple):
    """A labeled row. content: what a task needs to create the sample, such as its text.

    spelling: the label as written in the input. split: its split, or None if a hash of `group`, by
    default the content, chooses it. path: the hierarchy above the class, if the input provides it.
    """

    file: int
    position: int
    key: str
    content: bytes
    label: str
    spelling: str
    split: str | None = None
    group: str | None = None
    path: str | None = None


class Batch(NamedTuple):
    """Rows that are stored at once. columns: `_COLUMNS` by name. data: the keys and contents.
    counts: the records that were read or skipped, by reason. size: the number of bytes read.
    """

    columns: dict[str, np.ndarray]
    data: bytes
    counts: Counter[str]
    size: int = 0


class Task(NamedTuple):
    """A sample to write: its key, its content and its label."""

    key: str
    content: bytes
    label: int


@dataclass
class Selected:
    """The result of the first pass. splits: the tasks of the splits that have samples. spellings:
    the spellings of the labels that have several. paths: the hierarchy above each label that has
    one. counts: a map from readable descriptions to numbers.
    """

    labels: list[str]
    splits: dict[str, "Tasks"]
    spellings: dict[str, list[str]]
    paths: dict[str, str]
    counts: Counter[str]


class Tasks(Sequence[Task]):
    """The tasks of a split in two memory-mapped files: `rows` states where they are in `contents`,
    bytes [N].
    """

    def __init__(self, rows: np.memmap, contents: np.memmap) -> None:
        self._rows = rows
        self._contents = contents

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        start, size, key_size, label = self._rows[i].item()
        data = self._contents[start : start + key_size + size].tobytes()
        return Task(data[:key_size].decode(), data[key_size:], label)

    @classmethod
    def open(cls, rows: Path, contents: Path) -> "Tasks":
        return cls(np.memmap(rows, _TASK, "r"), np.memmap(contents, np.uint8, "r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tasks.open, (self._rows.filename, self._contents.filename)


def gather(rows: Iterable[Row], test_fraction: float, counts: Counter[str], size: int = 0) -> Batch:
    """Return a batch of `rows`, which counts records in `counts` while it is read.

    test_fraction: the fraction to hold out of the rows without a split.
    """
    data = bytearray()
    found = []
    for row in rows:
        high, low = _content_hash(row.content)
        split = row.split
        if split is None:
            chosen = high if row.group is None else _content_hash(row.group.encode())[0]
            split = TEST if float(chosen) < test_fraction * 2.0**64 else TRAIN
        key = row.key.encode()
        found.append(
            (high, low, row.label, row.spelling, split, row.path or "", row.file, row.position,
             len(data), len(row.content), len(key))
        )  # fmt: skip
        data += key
        data += row.content
    columns = zip(*found, strict=True) if found else ([] for _ in _COLUMNS)
    table = {
        name: np.array(column, dtype)
        for (name, dtype), column in zip(_COLUMNS.items(), columns, strict=True)
    }
    return Batch(table, bytes(data), counts, size)


def _content_hash(content: bytes) -> tuple[int, int]:
    """Return the two halves of a 128-bit hash (BLAKE2b)."""
    whole = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(whole[:8]), int.from_bytes(whole[8:])


def select(
    folder: Path,
    batches: Iterable[Batch],
    *,
    choose: Callable[[Counter[str], Counter[str]], list[str]],
    where: Callable[[int, int], str],
    drop_duplicates: bool,
    drop_across: bool,
    is_text: bool,
) -> Selected:
    """Run the first pass. The tasks are in `folder`, which the caller deletes.

    choose: a function that receives, for each label, the number of samples and the number of
    training samples, and returns the labels that become classes, in order. where: a function that
    describes a file and a position for errors. drop_duplicates: whether to keep only the first of
    several rows with the same content, label and split. drop_across: whether to remove training
    rows whose content also occurs in another split. is_text: whether rows with the same content
    may have different labels.

    A folder that a killed command left behind is replaced. Raises ValueError for an unrelated
    folder, for rows that break a rule, and if no classes remain.
    """
    if folder.exists():
        if any(folder.iterdir()) and not (folder / _CONTENTS).is_file():
            raise ValueError(
                f"{folder} contains unrelated files: choose another folder for the shards"
            )
        rmtree(folder)
    folder.mkdir(parents=True)
    # Each thread needs memory to sort. Every query that depends on an order states it.
    config: dict[str, Any] = {
        "memory_limit": _MEMORY,
        "threads": _THREADS,
        "temp_directory": str(folder / "sorting"),
        "preserve_insertion_order": False,
    }
    with duckdb.connect(str(folder / "rows.duckdb"), config=config) as rows:
        counts = _store(rows, batches, folder / _CONTENTS)
        if not is_text:
            _check_one_label(rows, where)
        spellings = rows.execute(
            "SELECT label, list_sort(list(DISTINCT spelling)) FROM rows GROUP BY label"
            " HAVING count(DISTINCT spelling) > 1 ORDER BY label"
        ).fetchall()
        duplicates = _find(
            rows,
            "rowid IN (SELECT rowid FROM rows QUALIFY row_number() OVER"
            " (PARTITION BY high, low, label, split ORDER BY file, position) > 1)",
            drop=drop_duplicates,
        )
        across = _find(
            rows,
            "split = 'train' AND EXISTS (SELECT 1 FROM rows AS other WHERE other.high = rows.high"
            " AND other.low = rows.low AND other.split != 'train')",
            drop=drop_across,
        )
        noun, done = "texts" if is_text else "images", {True: "dropped", False: "kept"}
        counts[f"duplicates {done[drop_duplicates]}"] += duplicates
        counts[f"training {noun} that also occur in another split, {done[drop_across]}"] += across
        samples, trained = Counter[str](), Counter[str]()
        for label, number, in_train in rows.execute(
            "SELECT label, count(*), count(*) FILTER (split = 'train') FROM rows"
            " GROUP BY label ORDER BY label"
        ).fetchall():
            samples[label], trained[label] = number, in_train
        labels = choose(samples, +trained)
        if excluded := samples.total() - sum(samples[name] for name in labels):
            counts["samples of excluded classes"] = excluded
        splits = _write_tasks(rows, labels, folder)
        return Selected(labels, splits, dict(spellings), _paths(rows), counts)


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
                rows.execute(f"INSERT INTO rows SELECT {', '.join(_COLUMNS)} FROM columns")
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
        f"{shown(label)} and {shown(other_label)}: remove one of them"
    )


def _find(rows: duckdb.DuckDBPyConnection, condition: str, *, drop: bool) -> int:
    """Return the number of rows that fulfill a condition, and optionally delete them."""
    action = "DELETE" if drop else "SELECT count(*)"
    return int(rows.execute(f"{action} FROM rows WHERE {condition}").fetchall()[0][0])


def _write_tasks(
    rows: duckdb.DuckDBPyConnection, labels: list[str], folder: Path
) -> dict[str, Tasks]:
    """Write the tasks of each split that has some, in the order of their hashes."""
    classes = {"label": np.array(labels, object), "number": np.arange(len(labels))}  # noqa: F841
    rows.execute("CREATE TEMP TABLE classes AS SELECT * FROM classes")
    given = [name for (name,) in rows.execute("SELECT DISTINCT split FROM rows").fetchall()]
    contents = np.memmap(folder / _CONTENTS, np.uint8, "r")
    tasks = {}
    for split in [TRAIN, TEST, *sorted(set(given) - {TRAIN, TEST})]:
        rows.execute(
            "SELECT start, size, key_size, number FROM rows JOIN classes USING (label)"
            " WHERE split = ? ORDER BY high, low, label, file, position",
            [split],
        )
        path = folder / f"{split}.tasks"
        with path.open("wb") as file:
            while found := rows.fetchmany(_FETCHED):
                np.array(found, _TASK).tofile(file)
        if path.stat().st_size:
            tasks[split] = Tasks(np.memmap(path, _TASK, "r"), contents)
    return tasks


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
