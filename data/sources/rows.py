"""The rows of a first pass over the input, and the tasks that it selects.

The content of each row is appended to one file. Order and split depend only on a hash of the
content. Contents with equal 128-bit hashes are considered identical: the probability of a collision
among 5e9 different texts is 4e-20.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.shards.index import Label
from data.shards.split_names import TEST, TRAIN

# Keys of counts: the number of damaged records, and a prefix for the location of the first damaged
# record.
DAMAGED = "damaged records"
FIRST_DAMAGED = "first damaged: "
TASK = np.dtype([("start", "<u8"), ("size", "<u4"), ("key_size", "<u4"), ("label", "<u4")])
# The labels of a task are the `num_labels` elements of a file that begin with number `first`.
TASK_OF_SET = np.dtype([*TASK.descr[:3], ("first", "<u8"), ("num_labels", "<u4")])
LABEL_OF_SET = np.dtype("<i4")
COLUMNS = {
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

    label: the name of its class or, with sets of labels, those of its classes, as `joined_names`
    returns them. spelling: the label as written in the input. split: its split, or None if a hash
    of `group`, by default the content, chooses it. path: the hierarchy above the class, if the
    input provides it.
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
    """Rows that are stored at once. columns: `COLUMNS` by name. data: the keys and contents.
    counts: the records that were read or skipped, by reason. size: the number of bytes read.
    """

    columns: dict[str, np.ndarray]
    data: bytes
    counts: Counter[str]
    size: int = 0


class Task(NamedTuple):
    """A sample to write: its key, its content and its label, or a tuple of its labels."""

    key: str
    content: bytes
    label: Label


class Tasks(Sequence[Task]):
    """The tasks of a split in memory-mapped files: `rows` states where they are in `contents`,
    bytes [N], and, with sets of labels, where their labels are in `labels`, int32 [L].
    """

    def __init__(self, rows: Path, contents: Path, labels: Path | None = None) -> None:
        self._files = rows, contents, labels
        self._rows = np.memmap(rows, TASK if labels is None else TASK_OF_SET, "r")
        self._contents = np.memmap(contents, np.uint8, "r")
        self._labels = None if labels is None else np.memmap(labels, LABEL_OF_SET, "r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: Any) -> Any:
        start, size, key_size, label, *num_labels = self._rows[i].item()
        if self._labels is not None:
            label = tuple(self._labels[label : label + num_labels[0]].tolist())
        data = self._contents[start : start + key_size + size].tobytes()
        return Task(data[:key_size].decode(), data[key_size:], label)

    def num_unlabeled(self) -> int:
        """Return the number of tasks with an empty set of labels."""
        return 0 if self._labels is None else int(np.count_nonzero(self._rows["num_labels"] == 0))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tasks, self._files


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
    columns = zip(*found, strict=True) if found else ([] for _ in COLUMNS)
    table = {
        name: np.array(column, dtype)
        for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
    }
    return Batch(table, bytes(data), counts, size)


def _content_hash(content: bytes) -> tuple[int, int]:
    """Return the two halves of a 128-bit hash (BLAKE2b)."""
    whole = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(whole[:8]), int.from_bytes(whole[8:])
