"""Reads a whole folder of shards and says what is damaged: checksums, members, labels, counts."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from data.index import LABEL_EXTENSION, ShardIndex, open_index, read_key, read_member
from data.manifest import Manifest, ShardInfo, load_label_vectors

_NAMED_A_SHARD = 10


def damages(folder: Path, report: Callable[[int, int], None]) -> Iterator[str]:
    """Yield one line for each damage; `report(done, total)` counts samples."""
    manifest = Manifest.read(folder)
    total = sum(shard.samples for shard in manifest.shards)
    done = 0
    for shard in manifest.shards:
        try:
            yield from _damages_of(folder, shard, len(manifest.classes))
        except (ValueError, OSError) as error:
            yield str(error)
        done += shard.samples
        report(done, total)
    if manifest.label_vectors is not None:
        try:
            load_label_vectors(folder, manifest)
        except (ValueError, OSError) as error:
            yield str(error)


def _damages_of(folder: Path, shard: ShardInfo, num_classes: int) -> Iterator[str]:
    path = folder / shard.file
    if not path.is_file():
        yield f"{path} is missing"
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != shard.sha256:
            yield f"{path} has SHA-256 {digest[:12]}…, not {shard.sha256[:12]}… as written"
        index = open_index(path)
        if index.info != shard:
            yield f"{path}: its index belongs to other shards than the manifest"
            return
        found = 0
        for line in _damaged_samples(file.fileno(), index, num_classes):
            found += 1
            if found <= _NAMED_A_SHARD:
                yield f"{path}: {line}"
        if found > _NAMED_A_SHARD:
            yield f"{path}: {found - _NAMED_A_SHARD} more damaged samples"


def _damaged_samples(descriptor: int, index: ShardIndex, num_classes: int) -> Iterator[str]:
    size = os.fstat(descriptor).st_size
    for row in range(index.info.samples):
        try:
            key = read_key(descriptor, index, row)
        except ValueError as error:
            yield str(error)
            continue
        label = int(index.labels[row])
        if read_member(descriptor, index, row) is None:
            yield f"the bytes of {key} are not those that were written" + (
                " (the file ends before them)" if _end(index, row) > size else ""
            )
        elif read_member(descriptor, index, row, column=1) != str(label).encode():
            yield f"{key}.{LABEL_EXTENSION} does not say {label}, as the index does"
        elif not 0 <= label < num_classes:
            yield f"{key} has label {label} and there are {num_classes} classes"


def _end(index: ShardIndex, row: int) -> int:
    return int(index.blocks[row, 0]) * 512 + int(index.sizes[row, 0])
