"""Counts and examples from a folder of shards. The command `kway shard show` formats them.

Examples are deterministic: the first samples of classes that are evenly spaced in the class list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.shards.manifest import Manifest
from data.shards.split import Split, open_split


@dataclass(frozen=True)
class SplitContents:
    """The contents of a split.

    counts: the number of samples of each class, int64 [K]. no_class: the number of samples whose
    label is out of range.
    """

    name: str
    shards: int
    bytes: int
    samples: int
    counts: np.ndarray

    @property
    def no_class(self) -> int:
        return self.samples - int(self.counts.sum())


def contents(folder: Path | str, manifest: Manifest) -> list[SplitContents]:
    """Return the contents of each split. Raises the errors of `open_split`."""
    found = []
    for name in manifest.splits:
        shards = manifest.of_split(name)
        with open_all(folder, manifest, name) as split:
            size = sum(shard.bytes for shard in shards)
            found.append(SplitContents(name, len(shards), size, len(split), split.class_counts()))
    return found


def open_all(folder: Path | str, manifest: Manifest, name: str) -> Split:
    """Open a split to display it, without a limit on bad labels."""
    return open_split(folder, name, max_bad_labels=2**63, manifest=manifest)


def examples(split: Split, number: int) -> list[int]:
    """Return up to `number` samples of a split, in class-list order.

    If there are more than `number` classes, the result contains one sample of each of `number`
    classes. Otherwise, it contains the same number of samples of each class.
    """
    present = np.flatnonzero(split.class_counts())
    chosen = present[
        np.linspace(0, len(present) - 1, min(number, len(present))).round().astype(int)
    ]
    each = max(1, number // max(1, len(chosen)))
    labels = split.labels
    return [i for label in chosen for i in np.flatnonzero(labels == label)[:each].tolist()]


def texts(split: Split, number: int) -> Iterator[tuple[str, str]]:
    """Yield (class name, text) for each example. Invalid UTF-8 is shown as U+FFFD."""
    for index in examples(split, number):
        try:
            data, _, label = split.read(index)
        except ValueError as error:
            yield "damaged", str(error)
            continue
        yield split.classes[label].name, data.decode("utf-8", "replace")
