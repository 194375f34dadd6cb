"""Finds the damage in one shard with a single read from its first byte to its last.

Checks the SHA-256 of the file, the crc32 of each member, labels, UTF-8 of texts and optionally
pixels. Tar headers are checked only if the SHA-256 does not match.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from isal import isal_zlib

from data.messages import printable
from data.shards.index import ShardIndex, open_index, read_key
from data.shards.manifest import ShardInfo
from data.tars.headers import BLOCK, Fault, header_size, walk
from data.tars.labels import ClassList, label_text
from data.tars.samples import ShardPass

Kind = Literal[
    "missing shard",
    "cut shard",
    "replaced shard",
    "changed shard",
    "index",
    "tar header",
    "bytes",
    "label",
    "text",
    "image",
    "label vectors",
]


@dataclass(frozen=True)
class Damage:
    """Damage at `count` locations. line: names the shard, and the key if there is one.

    kind: one of `Kind`.
    """

    kind: Kind
    line: str
    count: int = 1


@dataclass(frozen=True)
class Rules:
    """What the samples of a folder are checked against.

    classes: how to read the labels of tars that kway only indexed; None: each label is its number.
    incomplete: shards whose missing samples the manifest records.
    """

    folder: Path
    text: bool
    num_classes: int
    classes: ClassList | None
    label_field: str
    file_of_sha256: dict[str, str]
    incomplete: Collection[str]
    decode: bool
    named: int | None


_CUT_BEFORE_INDEXED = "copy the tar again, or record this with kway shard index --skip-bad"

# Row of a bad sample -> (kind, text that follows its key in a line).
_Wrong = dict[int, tuple[Kind, str]]


def check_shard(rules: Rules, shard: ShardInfo) -> list[Damage]:
    """Return all damage of one shard."""
    path = rules.folder / shard.file
    if not path.is_file():
        return [Damage("missing shard", f"{path} is missing, and its {shard.samples:,} samples")]
    found: list[Damage] = []
    index = None
    try:
        index = open_index(path)
        if index.info != shard:
            index = None
            raise ValueError(f"{path}: its index belongs to other shards than the manifest")
    except (ValueError, OSError) as error:
        found.append(Damage("index", str(error)))
    try:
        with ShardPass(path) as opened:
            wrong = {} if index is None else _wrong_samples(rules, index, opened)
            digest = opened.sha256()
        as_indexed = digest == shard.sha256 and shard.file not in rules.incomplete
        end = _end_fault(path, index) if as_indexed else None
    except (ValueError, OSError) as error:  # an unreadable disk, or overlapping entries
        return [*found, Damage("changed shard", f"{path} cannot be read: {error}")]
    if digest != shard.sha256:
        whole = _of_file(rules, path, shard, digest, wrong)
        found.append(whole)
        if whole.kind == "replaced shard":
            return found
    if end is not None:
        line = f"{path}, at byte {end.offset:,}: {end.what}; {_CUT_BEFORE_INDEXED}"
        found.append(Damage("cut shard", line))
    if index is not None:
        found += _of_samples(rules, path, index, wrong, changed=digest != shard.sha256)
    return found


def _end_fault(path: Path, index: ShardIndex | None) -> Fault | None:
    """Return the fault at the end of a tar that has not changed since indexing, or None."""
    start = 0
    if index is not None:
        ends = index.blocks.astype(np.int64) + -(-index.sizes.astype(np.int64) // BLOCK)
        start = int(ends.max()) * BLOCK
    with path.open("rb", buffering=0) as file:
        faults = (found for found in walk(file.fileno(), start) if isinstance(found, Fault))
        return next((fault for fault in faults if fault.ends_tar), None)


def _wrong_samples(rules: Rules, index: ShardIndex, opened: ShardPass) -> _Wrong:
    blocks, sizes, crc32 = (
        column.ravel().tolist() for column in (index.blocks, index.sizes, index.crc32)
    )
    labels, extensions = index.labels.tolist(), index.extension[:, 1].tolist()
    wrong: _Wrong = {}
    for place in np.argsort(index.blocks, axis=None, kind="stable").tolist():
        row, column = divmod(place, 2)
        data = opened.take(blocks[place] * BLOCK, sizes[place])
        sound = isal_zlib.crc32(data) == crc32[place]
        if column == 0:
            problem = _of_sample(rules, data, sound=sound, cut=len(data) < sizes[place])
        else:
            extension = index.extensions[extensions[row]]
            problem = _of_label(rules, data, extension, labels[row], sound=sound)
        if problem is not None and (row not in wrong or column == 0):
            wrong[row] = problem
    return wrong


def _of_sample(
    rules: Rules, data: memoryview, *, sound: bool, cut: bool
) -> tuple[Kind, str] | None:
    if not sound:
        end = " (the file ends before them)" if cut else ""
        return "bytes", f": its bytes are not those that were written{end}"
    try:
        if rules.text:
            str(data, "utf-8")
        elif rules.decode:
            from data.images.decode import decode  # importing OpenCV is slow and not always needed

            decode(bytes(data), 3)
    except UnicodeDecodeError as error:
        return "text", f": not UTF-8 from its byte {error.start} on"
    except ValueError as error:
        return "image", f": {error}"
    return None


def _of_label(
    rules: Rules, data: memoryview, extension: str, label: int, *, sound: bool
) -> tuple[Kind, str] | None:
    if not 0 <= label < rules.num_classes:
        return "label", f" has label {label} and there are {rules.num_classes} classes"
    if sound and rules.classes is None:
        sound = data == str(label).encode()
    elif sound and rules.classes is not None:
        try:
            sound = rules.classes.label(label_text(extension, data, rules.label_field)) == label
        except ValueError:
            sound = False
    return None if sound else ("label", f".{extension} does not say {label}, as the index does")


def _of_file(rules: Rules, path: Path, shard: ShardInfo, digest: str, wrong: _Wrong) -> Damage:
    """Return the damage of a file whose SHA-256 does not match."""
    if (other := rules.file_of_sha256.get(digest)) is not None:
        return Damage("replaced shard", f"{path} is a copy of {other}: put the right one there")
    sums = f"SHA-256 {digest[:12]}…, not {shard.sha256[:12]}… as written"
    hit = [text for kind, text in wrong.values() if kind == "bytes"]
    size = path.stat().st_size
    if len(hit) == shard.samples and not all(text.endswith("before them)") for text in hit):
        line = f"{path} has {sums}: none of its {shard.samples:,} samples is there: another file"
        return Damage("replaced shard", line)
    if size < shard.bytes:
        return Damage(
            "cut shard", f"{path} has {size:,} bytes of {shard.bytes:,}: it is cut off; {sums}"
        )
    more = "" if size == shard.bytes else f" and {size:,} bytes, not {shard.bytes:,}"
    return Damage("changed shard", f"{path} has {sums}{more}")


def _of_samples(
    rules: Rules, path: Path, index: ShardIndex, wrong: _Wrong, *, changed: bool
) -> list[Damage]:
    """Return a damage per bad sample, then per bad header. Those beyond `named` share one."""
    found: list[Damage] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        bad_headers = _bad_headers(descriptor, index) if changed else []
        for row in sorted(wrong):
            kind, text = wrong[row]
            found.append(Damage(kind, f"{path}: {_key(descriptor, index, row)}{text}"))
            if len(found) == rules.named:
                break
    finally:
        os.close(descriptor)
    found += [
        Damage("tar header", f"{path}: the tar header of {what} is damaged")
        for what in bad_headers[: rules.named]
    ]
    more = len(wrong) + len(bad_headers) - len(found)
    if more:
        found.append(Damage("bytes", f"{path}: {more:,} more damaged samples or headers", more))
    return found


def _key(descriptor: int, index: ShardIndex, row: int) -> str:
    try:
        return printable(read_key(descriptor, index, row))
    except ValueError:
        return f"sample {row}"


def _bad_headers(descriptor: int, index: ShardIndex) -> list[str]:
    """Return the members whose header is invalid or declares another size."""
    found = []
    for row in range(index.info.samples):
        for column in (0, 1):
            size = int(index.sizes[row, column])
            if header_size(descriptor, int(index.blocks[row, column])) != size:
                extension = index.extensions[int(index.extension[row, column])]
                found.append(f"sample {row} (.{extension})")
    return found
