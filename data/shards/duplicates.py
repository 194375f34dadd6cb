"""Counts byte-identical samples in finished shards, within and between splits.

The offset indices contain sizes and checksums. Samples with equal sizes and checksums are
candidates. Only candidates are read. Images that merely look similar are not found.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from isal import isal_zlib

from data.messages import kway_command
from data.shards.manifest import Manifest
from data.shards.split_names import TRAIN
from data.shards.writing.output import OutputFolder
from data.tars.headers import BLOCK


@dataclass(frozen=True)
class Duplicates:
    """Duplicates in one split.

    in_training: the number of samples that are also in the training split. other_class: the number
    of those samples whose copies in the training split all belong to other classes. repeated: the
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

    This requires about 30 bytes of memory per sample. Raises the errors of `Manifest.load`, and
    ValueError for a damaged sample.
    """
    output = OutputFolder(folder)
    manifest = Manifest.load(output.folder)
    found = {
        split: Duplicates(split, sum(shard.samples for shard in manifest.of_split(split)))
        for split in manifest.splits
    }
    groups: dict[bytes, list[tuple[str, int]]] = {}
    for digest, split, label in _candidates(output, manifest):
        groups.setdefault(digest, []).append((split, label))
    for members in groups.values():
        trained = {label for split, label in members if split == TRAIN}
        for split, number in Counter(split for split, _ in members).items():
            labels = [label for other, label in members if other == split]
            leaks = number if trained and split != TRAIN else 0
            moved = sum(label not in trained for label in labels) if leaks else 0
            old = found[split]
            found[split] = replace(
                old,
                in_training=old.in_training + leaks,
                other_class=old.other_class + moved,
                repeated=old.repeated + number - 1,
            )
    return tuple(found.values())


def _candidates(output: OutputFolder, manifest: Manifest) -> list[tuple[bytes, str, int]]:
    """Return (SHA-256, split, label) of each sample whose size and crc32 occur more than once."""
    indices = [output.index(shard.file) for shard in manifest.shards]
    shards = np.repeat(np.arange(len(indices)), [index.info.samples for index in indices])
    sizes, crc32, blocks = (
        np.concatenate([getattr(index, name)[:, 0] for index in indices]).astype(np.int64)
        for name in ("sizes", "crc32", "blocks")
    )
    labels = np.concatenate([index.labels for index in indices])
    _, groups, counts = np.unique(sizes << 32 | crc32, return_inverse=True, return_counts=True)
    found = []
    for sample in np.flatnonzero(counts[groups] > 1).tolist():
        shard = manifest.shards[shards[sample]]
        size = int(sizes[sample])
        data = output.read(shard.file, int(blocks[sample]) * BLOCK, size)
        if len(data) != size or isal_zlib.crc32(data) != crc32[sample]:
            raise ValueError(
                f"{output.location(shard.file)}: a sample is damaged: run "
                f"{kway_command('shard', 'verify', output)}"
            )
        found.append((hashlib.sha256(data).digest(), shard.split, int(labels[sample])))
    return found
