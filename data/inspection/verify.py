"""Reads every byte of the shards in a folder or at a URL, several in parallel, and reports damage.

It checks the SHA-256 of each file, the crc32 of each member, the labels, the UTF-8 encoding of
texts and, optionally, whether images can be decoded.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

import numpy as np
from isal import isal_zlib

from data.classes.class_list import ClassList
from data.files import sha256_of
from data.messages import Report, pluralize, printable
from data.processes import over_jobs
from data.remote.config import DEFAULT_CACHE, CacheConfig, address
from data.remote.fetch import fetch
from data.retry import RetriesExhaustedError
from data.shards.index import ShardIndex, read_index
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest, ShardInfo
from data.skipped import SKIPPED
from data.tars.headers import BLOCK, member_name
from data.tars.labels import INDEXED, Labels, label_texts

Kind = Literal[
    "missing shard",
    "shard",
    "index",
    "bytes",
    "label",
    "text",
    "image",
    "label vectors",
    "class list",
]
_NAMED_PER_SHARD = 10  # bad samples that are reported on lines of their own
_DECODING_COST = 20  # time per byte, relative to reading


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
class _Rules:
    """The properties that the samples of a folder must have. labels: what the labels mean if kway
    did not write the tars; otherwise, they are numbers. max_bytes: the size at which a download is
    stopped.
    """

    folder: Path | str
    text: bool
    num_classes: int
    labels: Labels | None
    label_field: str
    label_sets: bool
    decode: bool
    max_bytes: int


def damages(
    folder: Path | str,
    report: Report,
    *,
    manifest: Manifest | None = None,
    decode: bool = False,
    workers: int | None = None,
    ray: str | None = None,
) -> Iterator[Damage]:
    """Yield all damage. `report(done, total)` counts samples.

    manifest: the manifest of the folder, if it is already loaded. decode: whether to also decode
    images. workers: the number of processes; None selects one per core if there is enough to read.
    ray: the address of a Ray cluster to use instead.

    For a URL, each process downloads one shard at a time to a temporary file, and the cache is not
    used. Raises RetriesExhaustedError if the server cannot be reached.
    """
    manifest = Manifest.read(folder) if manifest is None else manifest
    total = sum(shard.samples for shard in manifest.shards)
    size = sum(shard.bytes for shard in manifest.shards) * (_DECODING_COST if decode else 1)
    labels = Labels.of_manifest(manifest) if manifest.source.kind == INDEXED else None
    if labels is not None and ray is not None and isinstance(folder, str):
        # Send the columns: the file of the list is in the cache of this machine, which other nodes
        # do not have.
        labels = replace(labels, classes=ClassList(manifest.classes.columns))
    rules = _Rules(
        folder=folder,
        text=manifest.modality == "text",
        num_classes=len(manifest.classes),
        labels=labels,
        label_field=str(manifest.source.parameters.get("label_field")),
        label_sets=manifest.label_sets,
        decode=decode,
        max_bytes=2 * max(shard.bytes for shard in manifest.shards),
    )
    work = partial(_check, rules)
    done = 0
    found = over_jobs(work, manifest.shards, total_bytes=size, workers=workers, ray=ray)
    for shard, found_here in zip(manifest.shards, found, strict=True):
        yield from found_here
        done += shard.samples
        report(done, total)
    if (
        (listed := manifest.class_file) is not None
        and isinstance(folder, Path)
        and sha256_of(folder / listed.file) != listed.sha256
    ):
        yield Damage("class list", f"{listed.file}: its SHA-256 differs from the manifest's")
    if manifest.label_vectors is not None:
        try:
            with TemporaryDirectory() as cache:  # a copy in the cache is not used
                load_label_vectors(folder, manifest, CacheConfig(folder=Path(cache)))
        except RetriesExhaustedError:
            raise
        except (ValueError, OSError) as error:
            yield Damage("label vectors", str(error))


def recorded_losses(folder: Path | str, manifest: Manifest) -> list[str]:
    """Return one line for each loss of samples that `kway shard index` recorded. Such losses do not
    count as damage.
    """
    about = manifest.source.parameters
    lines = [f"{file}: {reason}" for file, reason in manifest.incomplete.items()]
    if manifest.source.kind == INDEXED and (problems := about.get("left_out")):
        # Earlier versions counted the problems but did not list them in this file.
        listed = not isinstance(folder, str) and (folder / SKIPPED).is_file()
        where = f", listed in {SKIPPED}" if listed else ""
        lines.append(f"{pluralize(int(problems), 'problem')} skipped{where}")
    return lines


def _check(rules: _Rules, shard: ShardInfo) -> list[Damage]:
    """Return all damage in one shard. A shard at a URL is first downloaded to a temporary file."""
    folder, where = rules.folder, address(rules.folder, shard.file)
    lost = [Damage("missing shard", f"{where} is missing: {shard.samples:,} samples are lost")]
    if isinstance(folder, Path):
        path = folder / shard.file
        return _check_tar(rules, shard, path, where) if path.is_file() else lost
    # The file has no name, so its space is freed even if this process is killed.
    with TemporaryFile() as tar:
        try:
            fetch(where, tar, attempts=DEFAULT_CACHE.attempts, max_bytes=rules.max_bytes)
        except FileNotFoundError:
            return lost
        except (PermissionError, ValueError) as error:
            return [Damage("shard", str(error))]
        return _check_tar(rules, shard, Path(f"/proc/self/fd/{tar.fileno()}"), where)


def _check_tar(rules: _Rules, shard: ShardInfo, path: Path, name: str) -> list[Damage]:
    """Return the damage in the tar at `path` and in its index. Messages contain `name`."""
    found: list[Damage] = []
    index = None
    try:
        index = read_index(rules.folder, shard, attempts=DEFAULT_CACHE.attempts)
        if index.info != shard:
            index = None
            raise ValueError(f"{name}: its index does not match the manifest")
    except RetriesExhaustedError:
        raise
    except (ValueError, OSError) as error:
        found.append(Damage("index", str(error)))
    try:
        digest, size = sha256_of(path), path.stat().st_size
        samples = [] if index is None else _of_samples(rules, index, path, name)
    except OSError as error:  # the disk is unreadable
        return [*found, Damage("shard", f"{name} cannot be read: {error}")]
    if digest != shard.sha256:
        sizes = "" if size == shard.bytes else f" and it has {size:,} of {shard.bytes:,} bytes"
        line = (
            f"{name} was changed: its SHA-256 is {digest[:12]}…, but the manifest lists "
            f"{shard.sha256[:12]}…{sizes}"
        )
        found.append(Damage("shard", line))
    return found + samples


def _of_samples(rules: _Rules, index: ShardIndex, path: Path, name: str) -> list[Damage]:
    """Return one `Damage` per bad sample. Those beyond the tenth share one."""
    wrong: dict[int, tuple[Kind, str]] = {}
    found: list[Damage] = []
    with path.open("rb", buffering=0) as tar:
        # Members are read in the order of their offsets.
        for entry in np.argsort(index.blocks, axis=None, kind="stable").tolist():
            row, column = divmod(entry, 2)
            offset, size = int(index.blocks[row, column]) * BLOCK, int(index.sizes[row, column])
            data = os.pread(tar.fileno(), size, offset)
            if (problem := _problem(rules, index, row, column, data)) is not None:
                wrong.setdefault(row, problem)
        for row in sorted(wrong)[:_NAMED_PER_SHARD]:
            kind, text = wrong[row]
            try:
                extension = index.extensions[int(index.extension[row, 0])]
                key = member_name(tar.fileno(), int(index.blocks[row, 0]))
                key = printable(key.removesuffix(f".{extension}"))
            except ValueError:  # the tar header is damaged
                key = f"sample {row}"
            found.append(Damage(kind, f"{name}: {key}{text}"))
    if more := len(wrong) - len(found):
        found.append(Damage("bytes", f"{name}: {more:,} more damaged samples", more))
    return found


def _problem(
    rules: _Rules, index: ShardIndex, row: int, column: int, data: bytes
) -> tuple[Kind, str] | None:
    """Return the kind of what is wrong with a member and the text that follows its key, or None."""
    is_intact = isal_zlib.crc32(data) == index.crc32[row, column]
    if column == 1:
        extension = index.extensions[int(index.extension[row, 1])]
        labels = index.labels_of(row)
        for label in labels:
            if not 0 <= label < rules.num_classes:
                only = f"but there are only {rules.num_classes} classes"
                return "label", f" has label {label}, {only}"
        with suppress(ValueError):
            texts = label_texts(extension, data, rules.label_field, label_sets=rules.label_sets)
            meaning = int if rules.labels is None else rules.labels.label
            if is_intact and sorted(set(map(meaning, texts))) == labels:
                return None
        listed = " ".join(map(str, labels))
        return "label", f".{extension} differs from the label in the index, {listed or 'none'}"
    if not is_intact:
        end = " (the file ends before it)" if len(data) < index.sizes[row, column] else ""
        return "bytes", f": its checksum does not match{end}"
    try:
        if rules.text:
            str(data, "utf-8")
        elif rules.decode:
            from data.images.decode import decode  # importing OpenCV is slow and often not needed

            decode(data, 3)
    except UnicodeDecodeError as error:
        return "text", f": invalid UTF-8 at byte {error.start}"
    except ValueError as error:
        return "image", f": {error}"
    return None
