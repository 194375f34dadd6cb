"""Finds all damage in one shard in a single sequential read.

It checks the SHA-256 of the file, the crc32 of each member, the labels, the UTF-8 encoding of texts
and, optionally, whether images can be decoded. Tar headers are checked only if the SHA-256 does not
match.
"""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
from isal import isal_zlib

from data.messages import SHARD_AGAIN, printable
from data.remote.config import file_url
from data.remote.fetch import DigestError, fetch, unnamed_file
from data.retry import RetriesExhaustedError
from data.shards.index import (
    ShardIndex,
    index_path,
    max_index_bytes,
    open_index,
    parse_index,
    read_key,
)
from data.shards.manifest import ShardInfo
from data.tars.headers import BLOCK, Fault, header_size, walk
from data.tars.labels import ClassList, label_text
from data.tars.samples import ShardPass

Kind = Literal[
    "missing shard",
    "truncated shard",
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
    """One line of the report.

    line: the message, with the shard and, if there is one, the key of the sample. count: the number
    of damaged locations that the line covers.
    """

    kind: Kind
    line: str
    count: int = 1


@dataclass(frozen=True)
class Rules:
    """The properties that the samples of a folder must have.

    classes: for tars that kway indexed but did not write, a map from labels to numbers; None if the
    labels are already numbers. incomplete: the shards that the manifest lists as incomplete. named:
    the maximum number of samples per shard that are reported on separate lines, or None for no
    limit. max_bytes: the size at which a download of a shard is stopped. attempts: the number of
    attempts per download.
    """

    folder: Path | str
    text: bool
    num_classes: int
    classes: ClassList | None
    label_field: str
    file_of_sha256: dict[str, str]
    incomplete: Collection[str]
    decode: bool
    named: int | None
    max_bytes: int
    attempts: int


_TRUNCATED_BEFORE_INDEXING = (
    "copy the tar again, or record the damage with kway shard index --skip-bad"
)

_ENDS_BEFORE = " (the file ends before the sample)"
# Maps the row of a bad sample to (kind, text that follows the sample's key in the line).
_Wrong = dict[int, tuple[Kind, str]]


def check_shard(rules: Rules, shard: ShardInfo) -> list[Damage]:
    """Return all damage in one shard.

    A shard at a URL is first downloaded to a temporary file. Raises RetriesExhaustedError if a
    server cannot be reached.
    """
    if isinstance(rules.folder, str):
        return _check_at_url(rules, shard, rules.folder)
    path = rules.folder / shard.file
    if not path.is_file():
        return [_missing(path, shard)]
    return _check_tar(rules, shard, path, str(path), lambda: open_index(path))


def _check_at_url(rules: Rules, shard: ShardInfo, folder: str) -> list[Damage]:
    url = file_url(folder, shard.file)
    with unnamed_file() as tar:
        try:
            with suppress(DigestError):  # the check below finds what differs
                fetch(
                    url,
                    tar,
                    attempts=rules.attempts,
                    max_bytes=rules.max_bytes,
                    sha256=shard.sha256,
                )
        except FileNotFoundError:
            return [_missing(url, shard)]
        except (PermissionError, ValueError) as error:
            return [Damage("changed shard", str(error))]
        return _check_tar(
            rules, shard, Path(tar.name), url, lambda: _index_at_url(folder, shard, rules.attempts)
        )


def _index_at_url(folder: str, shard: ShardInfo, attempts: int) -> ShardIndex:
    url, content = file_url(folder, index_path(Path(shard.file)).name), BytesIO()
    try:
        found: ShardIndex = fetch(
            url,
            content,
            attempts=attempts,
            max_bytes=max_index_bytes(shard),
            parse=lambda: parse_index(content.getvalue()),
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{url} is missing: copy it, or {SHARD_AGAIN}") from error
    except ValueError as error:
        raise ValueError(f"{url} {str(error).removeprefix(url)}: upload it again") from error
    return found


def _missing(name: Path | str, shard: ShardInfo) -> Damage:
    return Damage("missing shard", f"{name} is missing: {shard.samples:,} samples are lost")


def _check_tar(
    rules: Rules, shard: ShardInfo, path: Path, name: str, open_index: Callable[[], ShardIndex]
) -> list[Damage]:
    """Return the damage in the tar at `path` and in its index. Messages contain `name`."""
    found: list[Damage] = []
    index = None
    try:
        index = open_index()
        if index.info != shard:
            index = None
            raise ValueError(f"{name}: its index does not match the manifest")
    except RetriesExhaustedError:
        raise
    except (ValueError, OSError) as error:
        found.append(Damage("index", str(error)))
    try:
        with ShardPass(path) as opened:
            wrong = {} if index is None else _wrong_samples(rules, index, opened)
            digest = opened.sha256()
        as_indexed = digest == shard.sha256 and shard.file not in rules.incomplete
        end = _end_fault(path, index) if as_indexed else None
    except (ValueError, OSError) as error:  # the disk is unreadable, or entries overlap
        return [*found, Damage("changed shard", f"{name} cannot be read: {error}")]
    if digest != shard.sha256:
        size = path.stat().st_size
        damage = _of_file(rules, name, size, shard, digest, wrong)
        found.append(damage)
        if damage.kind == "replaced shard":
            return found
    if end is not None:
        line = f"{name}, at byte {end.offset:,}: {end.what}; {_TRUNCATED_BEFORE_INDEXING}"
        found.append(Damage("truncated shard", line))
    if index is not None:
        found += _of_samples(rules, path, name, index, wrong, changed=digest != shard.sha256)
    return found


def _end_fault(path: Path, index: ShardIndex | None) -> Fault | None:
    """Return the fault that ends the tar early, or None. Call this for tars that have not changed
    since they were indexed.
    """
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
    # Check members in file order, so that the file is read sequentially.
    for entry in np.argsort(index.blocks, axis=None, kind="stable").tolist():
        row, column = divmod(entry, 2)
        data = opened.take(blocks[entry] * BLOCK, sizes[entry])
        intact = isal_zlib.crc32(data) == crc32[entry]
        if column == 0:
            truncated = len(data) < sizes[entry]
            problem = _of_sample(rules, data, intact=intact, truncated=truncated)
        else:
            extension = index.extensions[extensions[row]]
            problem = _of_label(rules, data, extension, labels[row], intact=intact)
        if problem is not None and (row not in wrong or column == 0):
            wrong[row] = problem
    return wrong


def _of_sample(
    rules: Rules, data: memoryview, *, intact: bool, truncated: bool
) -> tuple[Kind, str] | None:
    if not intact:
        end = _ENDS_BEFORE if truncated else ""
        return "bytes", f": its checksum does not match{end}"
    try:
        if rules.text:
            str(data, "utf-8")
        elif rules.decode:
            from data.images.decode import decode  # importing OpenCV is slow and often not needed

            decode(bytes(data), 3)
    except UnicodeDecodeError as error:
        return "text", f": invalid UTF-8 at byte {error.start}"
    except ValueError as error:
        return "image", f": {error}"
    return None


def _of_label(
    rules: Rules, data: memoryview, extension: str, label: int, *, intact: bool
) -> tuple[Kind, str] | None:
    if not 0 <= label < rules.num_classes:
        return "label", f" has label {label}, but there are only {rules.num_classes} classes"
    matches = intact
    if intact and rules.classes is None:
        matches = data == str(label).encode()
    elif intact and rules.classes is not None:
        try:
            matches = rules.classes.label(label_text(extension, data, rules.label_field)) == label
        except ValueError:
            matches = False
    if matches:
        return None
    return "label", f".{extension} differs from the label in the index, {label}"


def _of_file(
    rules: Rules, name: str, size: int, shard: ShardInfo, digest: str, wrong: _Wrong
) -> Damage:
    """Return the damage in a file whose SHA-256 does not match."""
    if (other := rules.file_of_sha256.get(digest)) is not None:
        return Damage("replaced shard", f"{name} is a copy of {other}: copy the correct shard")
    sums = f"its SHA-256 is {digest[:12]}…, but the manifest lists {shard.sha256[:12]}…"
    hit = [text for kind, text in wrong.values() if kind == "bytes"]
    if len(hit) == shard.samples and not all(text.endswith(_ENDS_BEFORE) for text in hit):
        line = (
            f"{name} contains none of its {shard.samples:,} samples, so it is a different file: "
            f"{sums}"
        )
        return Damage("replaced shard", line)
    if size < shard.bytes:
        return Damage(
            "truncated shard", f"{name} is truncated to {size:,} of {shard.bytes:,} bytes: {sums}"
        )
    more = "" if size == shard.bytes else f"; it has {size:,} bytes, not {shard.bytes:,}"
    return Damage("changed shard", f"{name} was changed: {sums}{more}")


def _of_samples(
    rules: Rules, path: Path, name: str, index: ShardIndex, wrong: _Wrong, *, changed: bool
) -> list[Damage]:
    """Return one `Damage` per bad sample, and then one per bad header. Those beyond `named` share
    one `Damage`.
    """
    found: list[Damage] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        bad_headers = _bad_headers(descriptor, index) if changed else []
        for row in sorted(wrong):
            kind, text = wrong[row]
            found.append(Damage(kind, f"{name}: {_key(descriptor, index, row)}{text}"))
            if len(found) == rules.named:
                break
    finally:
        os.close(descriptor)
    found += [
        Damage("tar header", f"{name}: the tar header of {what} is damaged")
        for what in bad_headers[: rules.named]
    ]
    more = len(wrong) + len(bad_headers) - len(found)
    if more:
        found.append(Damage("bytes", f"{name}: {more:,} more damaged samples or headers", more))
    return found


def _key(descriptor: int, index: ShardIndex, row: int) -> str:
    try:
        return printable(read_key(descriptor, index, row))
    except ValueError:
        return f"sample {row}"


def _bad_headers(descriptor: int, index: ShardIndex) -> list[str]:
    """Return the members whose header is invalid or declares the wrong size."""
    found = []
    for row in range(index.info.samples):
        for column in (0, 1):
            size = int(index.sizes[row, column])
            if header_size(descriptor, int(index.blocks[row, column])) != size:
                extension = index.extensions[int(index.extension[row, column])]
                found.append(f"sample {row} (.{extension})")
    return found
