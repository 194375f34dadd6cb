"""Finds byte-identical samples, to count them in finished shards or exclude them from training.

The offset indices contain sizes and checksums. Samples with equal sizes and checksums are
candidates. Only candidates are read, so no source needs another pass over its data. Images that
merely look similar are not found.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from isal import isal_zlib

from data.messages import kway_command
from data.shards.index import ShardIndex
from data.shards.manifest import Manifest
from data.shards.split_names import TRAIN
from data.shards.writing.output import OutputFolder, output_folder
from data.skipped import Skipped
from data.sources.source import Sample
from data.tars.headers import BLOCK

DUPLICATE = "duplicate of a sample in another split"
"""The reason for which `HeldOut` skips a sample."""


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
    output = output_folder(folder)
    manifest = Manifest.load(output.folder)
    found = {
        split: Duplicates(split, sum(shard.samples for shard in manifest.of_split(split)))
        for split in manifest.splits
    }
    shards = _Shards((output, shard.file) for shard in manifest.shards)
    groups: dict[bytes, list[tuple[str, int]]] = {}
    for sample, shard, data in shards.read(shards.candidates()):
        member = (manifest.shards[shard].split, int(shards.labels[sample]))
        groups.setdefault(hashlib.sha256(data).digest(), []).append(member)
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


class HeldOut:
    """The samples of the evaluation splits. `without` removes identical samples from training.

    This requires about 30 bytes of memory per sample. The workers on a node of a Ray cluster share
    this memory.
    """

    def __init__(self, shards: Iterable[tuple[OutputFolder, str]]) -> None:
        self._shards = _Shards(shards)
        self._order = np.argsort(self._shards.fingerprints, kind="stable")
        self._sorted = self._shards.fingerprints[self._order]

    def without(self, samples: Iterable[Sample | Skipped]) -> Iterator[Sample | Skipped]:
        """Yield `samples`. Those that also occur in another split are replaced with `Skipped`."""
        for sample in samples:
            if isinstance(sample, Sample) and self._contains(sample.data):
                yield Skipped(sample.key, DUPLICATE)
            else:
                yield sample

    def _contains(self, data: bytes) -> bool:
        fingerprint = np.uint64(len(data) << 32 | isal_zlib.crc32(data))
        first = np.searchsorted(self._sorted, fingerprint, "left")
        last = np.searchsorted(self._sorted, fingerprint, "right")
        candidates = self._order[first:last]
        return any(data == other for _, _, other in self._shards.read(candidates))


class _Shards:
    """The samples of several shards, numbered consecutively.

    fingerprints: the size and crc32 of each sample, uint64 [N]. labels: int32 [N].
    """

    def __init__(self, shards: Iterable[tuple[OutputFolder, str]]) -> None:
        self._files = list(shards)
        indices = [output.index(file) for output, file in self._files]
        self.fingerprints = np.concatenate([np.zeros(0, np.uint64), *map(_fingerprints, indices)])
        self.labels = np.concatenate([np.zeros(0, np.int32), *(one.labels for one in indices)])
        self._blocks = np.concatenate(
            [np.zeros(0, np.uint32), *(one.blocks[:, 0] for one in indices)]
        )
        self._starts = np.cumsum([0, *(one.info.samples for one in indices)])

    def candidates(self) -> np.ndarray:
        """Return the samples, int64 [M], whose fingerprint occurs more than once."""
        order = np.argsort(self.fingerprints, kind="stable")
        same = self.fingerprints[order][1:] == self.fingerprints[order][:-1]
        return np.union1d(order[1:][same], order[:-1][same])

    def read(self, samples: np.ndarray) -> Iterator[tuple[int, int, bytes]]:
        """Yield (sample, shard, bytes) for each of `samples`."""
        shards = np.searchsorted(self._starts, samples, side="right") - 1
        for sample, shard in zip(samples.tolist(), shards.tolist(), strict=True):
            (output, file), fingerprint = self._files[shard], int(self.fingerprints[sample])
            size = fingerprint >> 32
            data = output.read(file, int(self._blocks[sample]) * BLOCK, size)
            if len(data) != size or isal_zlib.crc32(data) != fingerprint & 0xFFFFFFFF:
                row = sample - int(self._starts[shard])
                raise ValueError(
                    f"{output.location(file)}: sample {row} is damaged: run "
                    f"{kway_command('shard', 'verify', output)}"
                )
            yield sample, shard, data


def _fingerprints(index: ShardIndex) -> np.ndarray:
    size, crc32 = index.sizes[:, 0].astype(np.uint64), index.crc32[:, 0].astype(np.uint64)
    return size << np.uint64(32) | crc32
