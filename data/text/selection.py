"""The second half of the first pass: removes exact duplicates, selects classes and writes tasks to
disk.

References are partitioned by hash into parts that fit in memory, so memory use does not grow with
their number. Texts with equal 128-bit hashes are considered identical: the probability of a
collision among 5e9 different texts is 4e-20.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np

from data.files import commit
from data.messages import Report
from data.text.references import FIRST_DAMAGED, REFERENCE, RecordReader, read_spans

PART_ROWS = 4_000_000
_ABOUT = "about.json"
_RESULT = "settled.json"


TASK = np.dtype([("offset", "<u8"), ("file", "<u4"), ("length", "<u4"), ("label", "<u4")])


class Task(NamedTuple):
    """A sample to write: the location of its record, and its label."""

    file: int
    offset: int
    length: int
    label: int


class TaskFile(Sequence[Task]):
    """The tasks of a split in a memory-mapped file, with 20 bytes per task."""

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


@dataclass(frozen=True)
class SelectionRules:
    """Rules that turn references into tasks.

    choose: a function that receives, for each label, the number of samples and the number of
    training samples, and returns the labels that become classes, in order. test_fraction: the
    fraction to hold out of the texts whose split is None, chosen by a hash so that identical texts
    share a split. drop_across: whether to remove training texts that also occur in another split.
    """

    choose: Callable[[Counter[str], Counter[str]], list[str]]
    test_fraction: float = 0.1
    drop_duplicates: bool = True
    drop_across: bool = False


@dataclass
class Selection:
    """The result of the first pass. `counts` maps readable descriptions to numbers."""

    labels: list[str]
    samples: dict[str, int]
    splits: list[str]
    counts: dict[str, int] = field(default_factory=dict)


def pass_notes(selection: Selection) -> list[str]:
    """Return one line for each nonzero count, and one with the location of the first damaged
    record.
    """
    notes = []
    for what, count in selection.counts.items():
        if count and not what.startswith(FIRST_DAMAGED):
            notes.append(f"{what}: {count:,}")
    damaged = [what for what in selection.counts if what.startswith(FIRST_DAMAGED)]
    return notes + damaged[:1]


class SelectionFolder:
    """A folder next to the shards with the results of the first pass.

    It exists until the shards have been written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def select(
        self,
        about: str,
        reader: RecordReader,
        rules: SelectionRules,
        *,
        workers: int | None,
        ray: str | None,
        report: Report,
    ) -> Selection:
        """Run the first pass, or load its result if `about` is the same as in the previous run.

        about: a description of the inputs and parameters. Raises ValueError if no classes remain.
        """
        self._claim(about)
        done = self.folder / _RESULT
        if not done.is_file():
            paths = read_spans(reader, self.folder, workers, ray, report)
            commit(done, json.dumps(asdict(_select(self.folder, paths, rules))).encode())
            for path in [*self.folder.glob("span-*"), *self.folder.glob("part-*")]:
                path.unlink()
        return Selection(**json.loads(done.read_bytes()))

    def tasks(self, split: str) -> TaskFile:
        return TaskFile(self.folder / f"{split}.tasks")

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


def _select(folder: Path, paths: Sequence[Path], rules: SelectionRules) -> Selection:
    labels, splits, counts = _names(paths)
    given = {name for name in splits if name is not None}
    split_names = ["train", "test", *sorted(given - {"train", "test"})]
    parts = _partition(folder, paths, labels, split_names, rules)
    samples, trained = Counter[str](), Counter[str]()
    for part in parts:
        rows = _without_duplicates(np.fromfile(part, REFERENCE), rules, counts)
        rows.tofile(part)
        for into, of in ((samples, rows), (trained, rows[rows["split"] == 0])):
            number = np.bincount(of["label"], minlength=len(labels)).tolist()
            into.update(dict(zip(labels, number, strict=True)))
    classes = rules.choose(+samples, +trained)
    _write_tasks(folder, parts, labels, classes, split_names)
    excluded = sum(samples.values()) - sum(samples[name] for name in classes)
    if excluded:
        counts["samples of excluded classes"] = excluded
    present = [name for name in split_names if (folder / f"{name}.tasks").stat().st_size]
    return Selection(classes, {name: samples[name] for name in classes}, present, dict(counts))


def _names(paths: Sequence[Path]) -> tuple[list[str], list[str | None], Counter[str]]:
    """Return all labels in sorted order, all splits, and the total counts."""
    labels: set[str] = set()
    splits: dict[str | None, None] = {}
    counts: Counter[str] = Counter()
    for path in paths:
        about = json.loads(path.read_bytes())
        labels.update(about["labels"])
        splits.update(dict.fromkeys(about["splits"]))
        counts.update(about["counts"])
    return sorted(labels), list(splits), counts


def _partition(
    folder: Path,
    paths: Sequence[Path],
    labels: Sequence[str],
    splits: Sequence[str],
    rules: SelectionRules,
) -> list[Path]:
    """Partition references by hash, so that identical texts are in the same part."""
    total = sum(path.with_suffix(".bin").stat().st_size for path in paths) // REFERENCE.itemsize
    num_parts = max(1, -(-total // PART_ROWS))
    parts = [folder / f"part-{number:06d}" for number in range(num_parts)]
    for part in parts:
        part.write_bytes(b"")
    label_at = {name: i for i, name in enumerate(labels)}
    split_at = {name: i for i, name in enumerate(splits)}
    for rows in _batches(paths, label_at, split_at, rules.test_fraction):
        # The top 24 bits of the hash, scaled to [0, num_parts). With 24 bits, the product fits in
        # 64 bits.
        part_of_row = ((rows["high"] >> np.uint64(40)) * np.uint64(num_parts)) >> np.uint64(24)
        order = np.argsort(part_of_row, kind="stable")
        bounds = np.searchsorted(part_of_row[order], np.arange(num_parts + 1))
        for number, part in enumerate(parts):
            if bounds[number] < bounds[number + 1]:
                with part.open("ab") as file:
                    rows[order[bounds[number] : bounds[number + 1]]].tofile(file)
    return parts


def _batches(
    paths: Sequence[Path],
    label_at: dict[str, int],
    split_at: dict[str, int],
    test_fraction: float,
) -> Iterator[np.ndarray]:
    """Yield the references of many spans at a time, with global positions of labels and splits."""
    gathered: list[np.ndarray] = []
    for path in paths:
        about = json.loads(path.read_bytes())
        rows = np.fromfile(path.with_suffix(".bin"), REFERENCE)
        if len(rows):
            rows["label"] = np.array([label_at[name] for name in about["labels"]])[rows["label"]]
            hashed = np.array([name is None for name in about["splits"]])[rows["split"]]
            given = np.array([split_at[name or "train"] for name in about["splits"]])
            test = rows["high"].astype(np.float64) < test_fraction * 2.0**64
            rows["split"] = np.where(hashed, test, given[rows["split"]])
            gathered.append(rows)
        if sum(map(len, gathered)) >= PART_ROWS:
            yield np.concatenate(gathered)
            gathered = []
    if gathered:
        yield np.concatenate(gathered)


def _without_duplicates(
    rows: np.ndarray, rules: SelectionRules, counts: Counter[str]
) -> np.ndarray:
    """Keep the first of several references with equal (text, label, split). Count duplicates and
    texts that occur in two splits.
    """
    keys = ("offset", "file", "split", "label", "low", "high")
    rows = rows[np.lexsort([rows[key] for key in keys])]
    if not len(rows):
        return rows
    same_text = _equal_to_previous(rows, ("high", "low"))
    again = same_text & _equal_to_previous(rows, ("label", "split"))
    counts["duplicates dropped" if rules.drop_duplicates else "duplicates kept"] += int(again.sum())
    if rules.drop_duplicates:
        rows, same_text = rows[~again], _equal_to_previous(rows[~again], ("high", "low"))
    text = np.cumsum(~same_text) - 1
    elsewhere = np.bincount(text[rows["split"] != 0], minlength=text[-1] + 1) > 0
    across = (rows["split"] == 0) & elsewhere[text]
    what = "dropped from training" if rules.drop_across else "kept in training"
    counts[f"texts of other splits {what}"] += int(across.sum())
    return rows[~across] if rules.drop_across else rows


def _equal_to_previous(rows: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    equal = np.ones(len(rows), bool)
    equal[:1] = False
    for key in keys:
        equal[1:] &= rows[key][1:] == rows[key][:-1]
    return equal


def _write_tasks(
    folder: Path,
    parts: Sequence[Path],
    labels: Sequence[str],
    classes: Sequence[str],
    splits: Sequence[str],
) -> None:
    class_at = {name: i for i, name in enumerate(classes)}
    label = np.array([class_at.get(name, -1) for name in labels] or [-1])
    files = [(folder / f"{name}.tasks").open("wb") for name in splits]
    for part in parts:
        rows = np.fromfile(part, REFERENCE)
        rows = rows[label[rows["label"]] >= 0]
        for number, file in enumerate(files):
            of_split = rows[rows["split"] == number]
            tasks = np.empty(len(of_split), TASK)
            for key in ("offset", "file", "length"):
                tasks[key] = of_split[key]
            tasks["label"] = label[of_split["label"]]
            tasks.tofile(file)
    for file in files:
        file.close()
