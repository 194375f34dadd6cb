"""What a folder of shards holds, in numbers and examples. How it is printed is the command's.

Examples are always the same ones: the first of classes that lie evenly over the class list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.shards.manifest import Manifest
from data.shards.split import Split, open_split


@dataclass(frozen=True)
class SplitContents:
    """counts: samples of each class, int64 [K]; no_class: samples whose label has none."""

    name: str
    shards: int
    bytes: int
    samples: int
    counts: np.ndarray

    @property
    def no_class(self) -> int:
        return self.samples - int(self.counts.sum())


class Bin(NamedTuple):
    """`classes` classes have from `low` up to and with `high` samples."""

    low: int
    high: int
    classes: int


def contents(folder: Path, manifest: Manifest) -> list[SplitContents]:
    """One for each split; raises as `open_split` does."""
    found = []
    for name in manifest.splits:
        shards = manifest.of_split(name)
        with open_all(folder, manifest, name) as split:
            size = sum(shard.bytes for shard in shards)
            found.append(SplitContents(name, len(shards), size, len(split), split.class_counts()))
    return found


def open_all(folder: Path, manifest: Manifest, name: str) -> Split:
    """A split whatever its labels are: they are shown, not trained on."""
    return open_split(folder, name, max_bad_labels=2**63, manifest=manifest)


def histogram(counts: np.ndarray) -> list[Bin]:
    """Classes by their number of samples [K]: 0, 1, 2-3, 4-7 and so on, without empty ends."""
    powers = np.array([int(count).bit_length() for count in counts], np.int64)
    return [
        Bin(power and 1 << (power - 1), (1 << power) - 1, int((powers == power).sum()))
        for power in range(int(powers.min()), int(powers.max()) + 1)
    ]


def examples(split: Split, number: int) -> list[int]:
    """Up to `number` samples of a split, in class-list order.

    With more classes than that, one of each of `number` classes; else equally many of each.
    """
    there = np.flatnonzero(split.class_counts())
    chosen = there[np.linspace(0, len(there) - 1, min(number, len(there))).round().astype(int)]
    each = max(1, number // max(1, len(chosen)))
    found = split.first_of(chosen.tolist(), each)
    return [index for label in chosen.tolist() for index in found[label]]


def texts(split: Split, number: int) -> Iterator[tuple[str, str]]:
    """(class name, text) of examples; what is no UTF-8 shows U+FFFD."""
    for index in examples(split, number):
        try:
            data, _, label = split.read(index)
        except ValueError as error:
            yield "damaged", str(error)
            continue
        yield split.classes[label].name, data.decode("utf-8", "replace")
