"""The samples of one tar as webdataset groups them, with the location, crc32 and label of each.

The first pass reads the headers, and the second pass reads the content. Incomplete samples are
counted and listed by name.
"""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from data.shards.index import Entry
from data.skipped import Skipped
from data.tars.headers import BLOCK, Fault, Member, walk
from data.tars.labels import label_text

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
TEXT_EXTENSIONS = ("txt",)
NAMED = 10
_PEEKED = 1000
_MAX_UINT32 = 2**32 - 1
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # webdataset's base_plus_ext
_CHUNK = 4 << 20


@dataclass
class Problems:
    """The number of problems, and the first `limit` of them by name, or all of them if `limit` is
    None.
    """

    limit: int | None = NAMED
    count: int = 0
    named: list[Skipped] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether any further problems are only counted, not named."""
        return self.limit is not None and len(self.named) >= self.limit

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if not self.is_full:
            self.named.append(Skipped(name, reason))

    def join(self, other: "Problems") -> None:
        self.count += other.count
        remaining = None if self.limit is None else self.limit - len(self.named)
        self.named += other.named[:remaining]


@dataclass(frozen=True)
class TarScan:
    """The n complete samples of a tar. Arrays keep this compact, because n may be large.

    locations: block, size and crc32 of the sample itself and of its label member, uint32 [n, 2, 3].
    extension: their positions in `extensions`, uint8 [n, 2]. text: the label as a position in
    `texts`, int32 [n]. groups: the number of samples as webdataset counts them, complete or not.
    other_files: the names of members that do not belong to a sample. unfinished: the reason why
    samples may be missing at the end, or "".
    """

    bytes: int
    sha256: str
    locations: np.ndarray
    extension: np.ndarray
    text: np.ndarray
    extensions: tuple[str, ...]
    texts: tuple[str, ...]
    problems: Problems
    groups: int
    other_files: tuple[str, ...]
    unfinished: str

    def entries(self, row: int) -> tuple[Entry, Entry]:
        """Return the sample itself and its label member."""
        sample, label = (
            Entry(self.extensions[extension], *numbers)
            for extension, numbers in zip(
                self.extension[row].tolist(), self.locations[row].tolist(), strict=True
            )
        )
        return sample, label


class Group(NamedTuple):
    """The members that share a key: a map from extensions in lower case to (extension as written,
    member).
    """

    key: str
    members: dict[str, tuple[str, Member]]


@dataclass(frozen=True)
class Rules:
    """How to find the parts of a sample.

    endings: the extensions that a sample can have, in order of preference. label_endings: the same
    for its label. json_field: the field of a `.json` label. named: see `Problems.limit`.
    """

    endings: Sequence[str]
    label_endings: Sequence[str]
    json_field: str
    named: int | None = NAMED


def scan_tar(path: Path, rules: Rules) -> TarScan:
    """Read one tar."""
    groups: list[Group] = []
    problems, other_files, unfinished = Problems(rules.named), [], ""
    with path.open("rb", buffering=0) as file:
        for found in walk(file):
            if isinstance(found, Fault):
                problems.add(f"{path}: at byte {found.offset:,}", found.what)
                unfinished = unfinished or found.what * found.ends_tar
            elif not add_member(groups, found):
                other_files.append(found.name)
    if not groups and not problems.count:
        problems.add(str(path), "contains no sample")
    picked = []
    for group in groups:
        try:
            picked.append((group.key, *pick(group, rules)))
        except ValueError as error:
            problems.add(f"{path}: {group.key}", str(error))
    return _read(path, picked, rules, problems, len(groups), tuple(other_files), unfinished)


def extensions_of(path: Path) -> Counter[str]:
    """Count the extensions, in lower case, of the first members of a tar."""
    groups: list[Group] = []
    with path.open("rb", buffering=0) as file:
        for found in islice(walk(file), _PEEKED):
            if isinstance(found, Member):
                add_member(groups, found)
    return Counter(extension for group in groups for extension in group.members)


def add_member(groups: list[Group], member: Member) -> bool:
    """Add a member to its sample.

    Members of one sample must be adjacent. Returns False for other files.
    """
    match = _KEY.fullmatch(member.name)
    if match is None or (member.name.startswith("__") and member.name.endswith("__")):
        return False
    key, extension = match.groups()
    if not groups or groups[-1].key != key or extension.lower() in groups[-1].members:
        groups.append(Group(key, {}))
    groups[-1].members[extension.lower()] = (extension, member)
    return True


def pick(group: Group, rules: Rules) -> tuple[tuple[str, Member], tuple[str, Member]]:
    """Return the sample itself and the member that contains its label.

    Raises ValueError if either is missing.
    """
    found = ", ".join(f".{extension}" for extension, _ in group.members.values())
    sample = next((group.members[e] for e in rules.endings if e in group.members), None)
    if sample is None:
        raise ValueError(f"no .{', .'.join(rules.endings)}, only {found}")
    label = next((group.members[e] for e in rules.label_endings if e in group.members), None)
    if label is None:
        raise ValueError(f"no .{' or .'.join(rules.label_endings)}, only {found}")
    if max(sample[1].size, label[1].size, label[1].offset // BLOCK) > _MAX_UINT32:
        raise ValueError(
            "a member is 4 GiB or larger, or starts beyond 2 TiB, so it cannot be indexed"
        )
    return sample, label


def _read(
    path: Path,
    picked: Sequence[tuple[str, tuple[str, Member], tuple[str, Member]]],
    rules: Rules,
    problems: Problems,
    num_groups: int,
    other_files: tuple[str, ...],
    unfinished: str,
) -> TarScan:
    """Read the tar once, and keep the samples whose label can be read."""
    locations, extension, text = array("I"), array("B"), array("i")
    extensions, texts = dict[str, int](), dict[str, int]()
    with ShardPass(path) as shard:
        for key, *parts in picked:
            crc32 = {}
            wrong, label = "", ""
            for ending, member in sorted(parts, key=lambda part: part[1].offset):
                data = shard.take(member.offset, member.size)
                crc32[member.offset] = isal_zlib.crc32(data)
                if member == parts[1][1]:
                    try:
                        label = label_text(ending, data, rules.json_field)
                    except ValueError as error:
                        wrong = str(error)
            if wrong:
                problems.add(f"{path}: {key}", wrong)
                continue
            text.append(texts.setdefault(label, len(texts)))
            for ending, member in parts:
                locations.extend((member.offset // BLOCK, member.size, crc32[member.offset]))
                extension.append(extensions.setdefault(ending, len(extensions)))
        return TarScan(
            bytes=path.stat().st_size,
            sha256=shard.sha256(),
            locations=np.frombuffer(locations, np.uint32).reshape(-1, 2, 3),
            extension=np.frombuffer(extension, np.uint8).reshape(-1, 2),
            text=np.frombuffer(text, np.int32),
            extensions=tuple(extensions),
            texts=tuple(texts),
            problems=problems,
            groups=num_groups,
            other_files=other_files,
            unfinished=unfinished,
        )


class ShardPass:
    """Reads members in the order of their offsets and hashes the file in the same pass."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._chunk = memoryview(b"")
        self._start = 0

    def take(self, offset: int, size: int) -> memoryview:
        """Return bytes [offset, offset + size), or fewer at the end of the file.

        The view is valid until the next call. Raises ValueError for an offset before the previous
        one.
        """
        if offset < self._start:
            raise ValueError(f"byte {offset:,} was requested after byte {self._start:,}")
        if offset + size > self._start + len(self._chunk):
            self._advance(offset, size)
        first = offset - self._start
        return self._chunk[first : first + size]

    def sha256(self) -> str:
        """Read the rest of the file and return the hexadecimal digest of the complete file."""
        while self._read(_CHUNK):
            pass
        return self._sha256.hexdigest()

    def _advance(self, offset: int, size: int) -> None:
        while offset >= self._start + len(self._chunk):
            self._start += len(self._chunk)
            self._chunk = memoryview(self._read(_CHUNK))
            if not self._chunk:
                self._start = offset
                return
        rest = self._chunk[offset - self._start :]
        parts = [bytes(rest)]
        missing = size - len(rest)
        while missing > 0 and (more := self._read(max(missing, _CHUNK))):
            parts.append(more)
            missing -= len(more)
        self._chunk, self._start = memoryview(b"".join(parts)), offset

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._sha256.update(data)
        return data

    def __enter__(self) -> "ShardPass":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
