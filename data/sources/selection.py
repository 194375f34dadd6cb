"""Selects labeled rows in a first pass over the input: duplicates, classes, order and splits.

Several processes read the input in spans. The driver appends the content of each row to one file
and inserts 60 bytes about it into a DuckDB database, which groups and sorts on disk, so memory use
does not grow with the number of rows. Order and split depend only on a hash of the content, not on
DuckDB. Contents with equal 128-bit hashes are considered identical: the probability of a collision
among 5e9 different texts is 4e-20.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np

from data.files import commit, flush
from data.messages import shown
from data.shards.hierarchy import PATH, SEPARATOR, join_path

TRAIN, TEST = "train", "test"
# Keys of counts: the number of damaged records, and a prefix for the location of the first damaged
# record in a span.
DAMAGED = "damaged records"
FIRST_DAMAGED = "first damaged: "
_ABOUT, _RESULT, _ROWS, _CONTENTS = "about.json", "selected.json", "rows.duckdb", "contents"
_MEMORY, _THREADS = "1GB", 4
_FETCHED = 100_000
_TASK = np.dtype([("start", "<u8"), ("size", "<u4"), ("key_size", "<u4"), ("label", "<u4")])


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
    """Rows that are stored at once. number: the number of the span, so that an interrupted pass can
    be continued. columns: `_COLUMNS` by name. data: the keys and contents. counts: the records that
    were read or skipped, by reason.
    """

    number: int
    columns: dict[str, np.ndarray]
    data: bytes
    counts: Counter[str]


class Task(NamedTuple):
    """A sample to write: its key, its content and its label."""

    key: str
    content: bytes
    label: int


@dataclass(frozen=True)
class Rules:
    """Rules that turn rows into tasks.

    choose: a function that receives, for each label, the number of samples and the number of
    training samples, and returns the labels that become classes, in order. test_fraction: the
    fraction to hold out of the rows without a split. drop_duplicates: whether to keep only the
    first of several rows with the same content, label and split. drop_across: whether to remove
    training rows whose content also occurs in another split. one_label: whether rows with the same
    content must have the same label. noun: the plural of a sample, for counts.
    """

    choose: Callable[[Counter[str], Counter[str]], list[str]]
    test_fraction: float = 0.1
    drop_duplicates: bool = True
    drop_across: bool = False
    one_label: bool = False
    noun: str = "texts"


class ConflictError(ValueError):
    """Two rows (file, position, label) with the same content and different labels."""

    def __init__(self, rows: list[tuple[int, int, str]]) -> None:
        super().__init__(str(rows))
        self.rows = rows


@dataclass
class Selected:
    """The result of the first pass. splits: the splits that have samples. spellings: the spellings
    of the labels that have several. paths: the hierarchy above each label that has one. counts: a
    map from readable descriptions to numbers.
    """

    labels: list[str]
    splits: list[str]
    spellings: dict[str, list[str]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Return one line for each nonzero count, and one with the first damaged record."""
        damaged = [what for what in self.counts if what.startswith(FIRST_DAMAGED)]
        counted = [
            f"{what}: {count:,}"
            for what, count in self.counts.items()
            if count and what not in damaged
        ]
        return counted + damaged[:1]


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


class SelectionFolder:
    """A folder next to the shards with the result of the first pass.

    It exists until the shards have been written. `select` fills it, and `tasks` reads it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def select(
        self, about: str, rules: Rules, read: Callable[[Collection[int]], Iterator[Batch]]
    ) -> Selected:
        """Run the first pass, or continue that of an interrupted run with the same `about`.

        about: a description of the inputs and parameters. read: a function that yields all batches
        except those with the given numbers. Raises `ConflictError`, and ValueError if no classes
        remain.
        """
        self._claim(about)
        done = self.folder / _RESULT
        if not done.is_file():
            with self._database() as rows:
                self._store(rows, read)
                selected = self._select(rows, rules)
            commit(done, json.dumps(asdict(selected)).encode())
            (self.folder / _ROWS).unlink()
        return Selected(**json.loads(done.read_bytes()))

    def tasks(self, split: str) -> Tasks:
        """Return the tasks of one of the splits that `select` returned."""
        return Tasks.open(self.folder / f"{split}.tasks", self.folder / _CONTENTS)

    def remove(self) -> None:
        """Delete the folder after the shards have been written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _claim(self, about: str) -> None:
        """Prepare the folder, deleting the results for other inputs or parameters.

        Raises ValueError for an unrelated folder.
        """
        note = self.folder / _ABOUT
        if self.folder.exists() and not note.is_file() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} contains unrelated files: choose another folder for the shards"
            )
        if not note.is_file() or note.read_text() != about:
            self.remove()
            self.folder.mkdir(parents=True)
            commit(note, about.encode())

    def _database(self) -> duckdb.DuckDBPyConnection:
        rows = duckdb.connect(
            str(self.folder / _ROWS),
            # Each thread needs memory to sort. Every query that depends on an order states it.
            config={
                "memory_limit": _MEMORY,
                "threads": _THREADS,
                "temp_directory": str(self.folder / "sorting"),
                "preserve_insertion_order": False,
            },
        )
        rows.execute(
            "CREATE TABLE IF NOT EXISTS rows (high UBIGINT, low UBIGINT, label VARCHAR,"
            " spelling VARCHAR, split VARCHAR, path VARCHAR, file UINTEGER, position UBIGINT,"
            " start UBIGINT, size UINTEGER, key_size UINTEGER)"
        )
        rows.execute(
            "CREATE TABLE IF NOT EXISTS spans (number UINTEGER, counts VARCHAR, stop UBIGINT)"
        )
        return rows

    def _store(
        self,
        rows: duckdb.DuckDBPyConnection,
        read: Callable[[Collection[int]], Iterator[Batch]],
    ) -> None:
        """Store the batches that the database does not contain yet.

        A batch is one transaction, and contents after the last one are removed.
        """
        found = rows.execute("SELECT number, stop FROM spans").fetchall()
        with (self.folder / _CONTENTS).open("ab") as contents:
            contents.truncate(max((stop for _, stop in found), default=0))
            contents.seek(0, 2)
            for number, columns, data, counts in read({number for number, _ in found}):
                # Arrays from a Ray task are read-only.
                columns["start"] = columns["start"] + np.uint64(contents.tell())
                contents.write(data)
                flush(contents)
                rows.begin()
                if len(columns["start"]):
                    rows.execute(f"INSERT INTO rows SELECT {', '.join(_COLUMNS)} FROM columns")
                entry = [number, json.dumps(counts), contents.tell()]
                rows.execute("INSERT INTO spans VALUES (?, ?, ?)", entry)
                rows.commit()

    def _select(self, rows: duckdb.DuckDBPyConnection, rules: Rules) -> Selected:
        counts = Counter[str]()
        for (line,) in rows.execute("SELECT counts FROM spans ORDER BY number").fetchall():
            counts.update(json.loads(line))
        if rules.one_label:
            _check_one_label(rows)
        _drop_duplicates(rows, rules, counts)
        samples, trained = Counter[str](), Counter[str]()
        for label, number, in_train in rows.execute(
            "SELECT label, count(*), count(*) FILTER (split = 'train') FROM kept"
            " GROUP BY label ORDER BY label"
        ).fetchall():
            samples[label], trained[label] = number, in_train
        labels = rules.choose(samples, +trained)
        if excluded := samples.total() - sum(samples[name] for name in labels):
            counts["samples of excluded classes"] = excluded
        splits = self._write_tasks(rows, labels)
        spellings = rows.execute(
            "SELECT label, list_sort(list(DISTINCT spelling)) FROM rows GROUP BY label"
            " HAVING count(DISTINCT spelling) > 1 ORDER BY label"
        ).fetchall()
        return Selected(labels, splits, dict(spellings), _paths(rows), dict(counts))

    def _write_tasks(self, rows: duckdb.DuckDBPyConnection, labels: list[str]) -> list[str]:
        """Write the tasks of each split, in the order of their hashes. Return the splits."""
        classes = {"label": np.array(labels, object), "number": np.arange(len(labels))}  # noqa: F841
        rows.execute("CREATE OR REPLACE TEMP TABLE classes AS SELECT * FROM classes")
        given = [name for (name,) in rows.execute("SELECT DISTINCT split FROM kept").fetchall()]
        present = []
        for split in [TRAIN, TEST, *sorted(set(given) - {TRAIN, TEST})]:
            rows.execute(
                "SELECT start, size, key_size, number FROM kept JOIN classes USING (label)"
                " WHERE split = ? ORDER BY high, low, label, file, position",
                [split],
            )
            with (self.folder / f"{split}.tasks").open("wb") as file:
                while found := rows.fetchmany(_FETCHED):
                    np.array(found, _TASK).tofile(file)
                if file.tell():
                    present.append(split)
        return present


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


def gather(number: int, rows: Iterable[Row], test_fraction: float, counts: Counter[str]) -> Batch:
    """Return a batch of `rows`, which counts records in `counts` while it is read."""
    data = bytearray()
    found = []
    for row in rows:
        high, low = content_hash(row.content)
        split = row.split
        if split is None:
            chosen = high if row.group is None else content_hash(row.group.encode())[0]
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
    return Batch(number, table, bytes(data), counts)


def content_hash(content: bytes) -> tuple[int, int]:
    """Return the two halves of a 128-bit hash (BLAKE2b)."""
    whole = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(whole[:8]), int.from_bytes(whole[8:])


def _check_one_label(rows: duckdb.DuckDBPyConnection) -> None:
    """Raise `ConflictError` with the first rows that have the same content and different labels."""
    found = rows.execute(
        "SELECT high, low FROM rows GROUP BY high, low HAVING min(label) != max(label)"
        " ORDER BY min((file::UHUGEINT << 64) + position) LIMIT 1"
    ).fetchone()
    if found is not None:
        raise ConflictError(
            rows.execute(
                "SELECT file, position, label FROM rows WHERE high = ? AND low = ?"
                " QUALIFY row_number() OVER (PARTITION BY label ORDER BY file, position) = 1"
                " ORDER BY file, position LIMIT 2",
                list(found),
            ).fetchall()
        )


def _drop_duplicates(rows: duckdb.DuckDBPyConnection, rules: Rules, counts: Counter[str]) -> None:
    """Create the table `kept`. Count duplicates, and training rows that occur in another split."""

    def number(query: str) -> int:
        return int(rows.execute(query).fetchall()[0][0])

    distinct = number("SELECT count(*) FROM (SELECT DISTINCT high, low, label, split FROM rows)")
    duplicates = number("SELECT count(*) FROM rows") - distinct
    counts["duplicates dropped" if rules.drop_duplicates else "duplicates kept"] += duplicates
    first = (
        "QUALIFY row_number() OVER (PARTITION BY high, low, label, split"
        " ORDER BY file, position) = 1"
    )
    rows.execute(
        "CREATE OR REPLACE TEMP TABLE kept AS SELECT * FROM rows "
        + (first if rules.drop_duplicates else "")
    )
    across = (
        "split = 'train' AND EXISTS (SELECT 1 FROM kept AS other WHERE other.high = kept.high"
        " AND other.low = kept.low AND other.split != 'train')"
    )
    what = "dropped" if rules.drop_across else "kept"
    counts[f"training {rules.noun} that also occur in another split, {what}"] += number(
        f"SELECT count(*) FROM kept WHERE {across}"
    )
    if rules.drop_across:
        rows.execute(f"DELETE FROM kept WHERE {across}")


def _paths(rows: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Return the hierarchy of each label. Raises ValueError for a label with two, and for invalid
    names.
    """
    found = rows.execute(
        "SELECT label, min(path), max(path) FROM kept GROUP BY label HAVING max(path) != ''"
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
