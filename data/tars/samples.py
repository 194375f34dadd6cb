"""The samples of one tar as webdataset groups them, with the location, crc32 and label of each.

Incomplete samples are listed by name.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from isal import isal_zlib

from data.files import sha256_of
from data.shards.index import Entry, IndexBuilder
from data.skipped import Skipped
from data.tars.headers import BLOCK, Fault, Member, walk
from data.tars.labels import Labels, label_texts

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
TEXT_EXTENSIONS = ("txt",)
_PEEKED = 1000
_MAX_UINT32 = 2**32 - 1
_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)  # webdataset's base_plus_ext


@dataclass(frozen=True)
class TarScan:
    """The complete samples of a tar.

    index: their locations. Their labels are positions in `texts` or, if there is a class list, in
    that list. num_ignored: the number of members that do not belong to a sample. unfinished: the
    reason why samples may be missing at the end, or "".
    """

    bytes: int
    sha256: str
    index: IndexBuilder
    texts: tuple[str, ...]
    problems: tuple[Skipped, ...]
    num_ignored: int
    unfinished: str


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
    for its label. json_field: the field of a `.json` label. classes: the class list, or None if the
    labels found are the classes. label_sets: whether each sample has a set of labels.
    """

    endings: Sequence[str]
    label_endings: Sequence[str]
    json_field: str
    classes: Labels | None
    label_sets: bool = False

    def pick(self, group: Group) -> list[tuple[str, Member]]:
        """Return the sample itself and the member that contains its label.

        Raises ValueError if either is missing.
        """
        parts = []
        for endings in (self.endings, self.label_endings):
            part = next((group.members[e] for e in endings if e in group.members), None)
            if part is None:
                found = ", ".join(f".{extension}" for extension, _ in group.members.values())
                raise ValueError(f"no .{' or .'.join(endings)}, only {found}")
            if max(part[1].size, part[1].offset // BLOCK) > _MAX_UINT32:
                raise ValueError(
                    "a member is 4 GiB or larger, or starts beyond 2 TiB, so it cannot be indexed"
                )
            parts.append(part)
        return parts


def scan_tar(path: Path, rules: Rules) -> TarScan:
    """Read one tar."""
    groups: list[Group] = []
    problems, num_ignored, unfinished = [], 0, ""
    index, texts = IndexBuilder(), dict[str, int]()
    with path.open("rb", buffering=0) as file:
        for found in walk(file):
            if isinstance(found, Fault):
                problems.append(Skipped(f"{path}: at byte {found.offset:,}", found.what))
                unfinished = unfinished or found.what * found.ends_tar
            elif not add_member(groups, found):
                num_ignored += 1
        if not groups and not problems:
            problems.append(Skipped(str(path), "contains no sample"))
        for group in groups:
            try:
                entries, content = [], b""
                for ending, (_, offset, size) in rules.pick(group):
                    content = os.pread(file.fileno(), size, offset)
                    crc32 = isal_zlib.crc32(content)
                    entries.append(Entry(ending, offset // BLOCK, size, crc32))
                of_label = entries[1].extension, content, rules.json_field
                labels = [
                    texts.setdefault(text, len(texts))
                    if rules.classes is None
                    else rules.classes.label(text)
                    for text in label_texts(*of_label, label_sets=rules.label_sets)
                ]
                label = sorted(set(labels)) if rules.label_sets else labels[0]
                index.add_entries(*entries, label=label)
            except ValueError as error:
                problems.append(Skipped(f"{path}: {group.key}", str(error)))
    return TarScan(
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        index=index,
        texts=tuple(texts),
        problems=tuple(problems),
        num_ignored=num_ignored,
        unfinished=unfinished,
    )


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
