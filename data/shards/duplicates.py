"""Counts byte-identical samples in finished shards, within and between splits.

Only samples whose size and crc32, which are in the offset indices, occur more than once are read.
Images that merely look similar are not found.
"""

import hashlib
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.split_names import TRAIN


@dataclass(frozen=True)
class Duplicates:
    """Duplicates in one split.

    in_training: the number of samples that are also in the training split. other_class: the number
    of those samples whose copies in the training split all have other labels. repeated: the
    number of samples that repeat an earlier sample of the same split.
    """

    split: str
    samples: int
    in_training: int = 0
    other_class: int = 0
    repeated: int = 0

    def __str__(self) -> str:
        parts = []
        if self.in_training:
            under = f", {self.other_class:,} of them with another class" * bool(self.other_class)
            parts.append(f"{self.in_training:,} of {self.samples:,} are also in {TRAIN}{under}")
        if self.repeated:
            parts.append(f"{self.repeated:,} of {self.samples:,} repeat an earlier sample")
        return f"{self.split}: {'; '.join(parts) or 'none'}"


def find_duplicates(folder: Path | str) -> tuple[Duplicates, ...]:
    """Count exact duplicates in each split of the finished shards at a path or URL.

    This requires about 30 bytes of memory per sample. Raises the errors of `open_split`, and
    BadSampleError for a damaged sample.
    """
    manifest = Manifest.load(folder)
    with ExitStack() as stack:
        splits = {
            name: stack.enter_context(open_split(folder, name, manifest=manifest))
            for name in manifest.splits
        }
        numbers = {name: split.checksums() for name, split in splits.items()}
        found, counts = np.unique(np.concatenate(list(numbers.values())), return_counts=True)
        groups: defaultdict[bytes, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        for name, split in splits.items():
            for sample in np.flatnonzero(np.isin(numbers[name], found[counts > 1])).tolist():
                data, _, label = split.read(sample)
                labels = tuple(np.atleast_1d(label).tolist())
                groups[hashlib.sha256(data).digest()].append((name, labels))
    leaks, moved, repeated = Counter[str](), Counter[str](), Counter[str]()
    for members in groups.values():
        trained = {label for name, label in members if name == TRAIN}
        repeated.update(name for name, _ in members)
        repeated.subtract({name for name, _ in members})
        if trained:
            held_out = [(name, label) for name, label in members if name != TRAIN]
            leaks.update(name for name, _ in held_out)
            moved.update(name for name, label in held_out if label not in trained)
    return tuple(
        Duplicates(name, len(numbers[name]), leaks[name], moved[name], repeated[name])
        for name in splits
    )
