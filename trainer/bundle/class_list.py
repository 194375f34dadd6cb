"""The class list of a bundle: exact lookup, incremental search, and suggestions for misspelled
names.

classes.jsonl        {"name": …, "attributes": {…}}: one class per line, in order of ID
classes.safetensors  `line_ends` int64 [K]: the end of each line;
                     `folded_names` uint8: the case-folded names in UTF-8, concatenated;
                     `folded_ends` int64 [K]: the end of each of them;
                     `name_hashes` int64 [K], ascending, and `ids_by_hash` int32 [K]

The files are mapped, so a list of millions of classes opens immediately. Every operation processes
arrays in chunks of bounded size and reads only the lines that it returns or compares.
"""

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.numpy import save_file

from data.files import mapped
from data.shards.manifest import paused_gc
from trainer.bundle.mapped_arrays import mapped_arrays
from trainer.bundle.spec import INDEX, LINES, ClassEntry

# Names that are compared with a misspelled one, for each part of it.
_CANDIDATES = 200
# The number of names whose lookups are cached.
_MAX_FOUND = 4096
# Bytes of names searched at a time.
_CHUNK = 1 << 22
# difflib takes quadratic time, and a longer string is unlikely to be a misspelled class name.
_MAX_QUERY_CHARACTERS = 200


@paused_gc()
def write_classes(folder: Path, entries: Iterable[ClassEntry]) -> int:
    """Write the files of the class list to `folder` and return the number of classes.

    Raises ValueError for a duplicate name or an empty list.
    """
    names, lengths = [], []
    with (folder / LINES).open("wb") as file:
        for entry in entries:
            line = entry.model_dump_json(exclude_defaults=True).encode() + b"\n"
            file.write(line)
            names.append(entry.name)
            lengths.append(len(line))
    if not names:
        raise ValueError("the class list is empty: a bundle needs at least one class")
    if len(set(names)) < len(names):
        raise ValueError(f"duplicate class name {Counter(names).most_common(1)[0][0]!r}")
    folded = [name.casefold().encode() for name in names]
    hashes = np.fromiter(map(_hash, names), np.int64, len(names))
    by_hash = np.argsort(hashes, kind="stable")
    arrays = {
        "line_ends": np.cumsum(lengths, dtype=np.int64),
        "folded_names": np.frombuffer(b"".join(folded), np.uint8),
        "folded_ends": np.cumsum(list(map(len, folded)), dtype=np.int64),
        "name_hashes": hashes[by_hash],
        "ids_by_hash": by_hash.astype(np.int32),
    }
    save_file(arrays, folder / INDEX)
    return len(names)


class ClassList:
    """The classes of a bundle folder, read on demand. The ID of a class is its index in the
    list."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        """Raises ValueError if the files do not contain `num_classes` classes."""
        self.path, each = folder / LINES, (num_classes,)
        arrays = mapped_arrays(
            folder / INDEX,
            {
                "line_ends": (np.int64, each),
                "folded_names": (np.uint8, (None,)),
                "folded_ends": (np.int64, each),
                "name_hashes": (np.int64, each),
                "ids_by_hash": (np.int32, each),
            },
        )
        self._line_ends = arrays["line_ends"]
        self._folded, self._ends = arrays["folded_names"], arrays["folded_ends"]
        self._hashes, self._by_hash = arrays["name_hashes"], arrays["ids_by_hash"]
        with self.path.open("rb") as file:
            self._lines = mapped(file)
        if len(self._lines) != self._line_ends[-1]:
            raise ValueError(f"{self.path} and {INDEX} do not match: copy the bundle again")
        self._found: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._line_ends)

    def __getitem__(self, class_id: int) -> ClassEntry:
        """Return the class with this ID. Raises IndexError if the ID is outside 0 … K - 1."""
        if not 0 <= class_id < len(self):
            raise IndexError(f"class ID {class_id} is out of range 0 … {len(self) - 1}")
        start = self._line_ends[class_id - 1] if class_id else 0
        # With a damaged index, this is a part of a line, several lines or none: no valid class.
        line = self._lines[start : self._line_ends[class_id]].tobytes()
        try:
            return ClassEntry.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(
                f"{self.path}: line {class_id + 1} is not a valid class: copy the bundle again"
            ) from error

    def contains(self, wanted: str | int) -> bool:
        """Return whether `id_of` finds a class or rejects an ID, without searching for similar
        names."""
        return (
            isinstance(wanted, int)
            or self.find(wanted) is not None
            or _number_in(wanted) is not None
        )

    def id_of(self, wanted: str | int) -> int:
        """Return the ID of a class, given its exact name or the ID itself as 3 or "#3".

        Raises ValueError if there is no such class, listing the nearest names, or if the ID "#3" is
        also the name of another class.
        """
        if isinstance(wanted, str):
            named, number = self.find(wanted), _number_in(wanted)
            if named is not None and number is not None and number < len(self) and number != named:
                name = self[number].name
                raise ValueError(
                    f"{wanted!r} is both the name of class {named} and the ID of class {name!r}: "
                    f"use '#{named}' or {name!r}"
                )
            if named is not None:
                return named
            if number is None:
                shown = wanted if len(wanted) <= 80 else wanted[:80] + "…"
                nearest = ", ".join(map(repr, self.nearest(wanted)))
                hint = f"the nearest names are {nearest}" if nearest else "no name is similar"
                raise ValueError(f"there is no class {shown!r}; {hint}")
            wanted = number
        if not 0 <= wanted < len(self):
            raise ValueError(f"class ID {wanted} is out of range 0 … {len(self) - 1}")
        return wanted

    def find(self, name: str) -> int | None:
        """Return the ID of the class with exactly this name, or None if there is none."""
        found = self._found.get(name)
        if found is None and (found := self._search_hash(name)) is not None:
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            self._found[name] = found
        return found

    def _search_hash(self, name: str) -> int | None:
        wanted = np.int64(_hash(name))  # an int would make searchsorted copy the array
        position = int(np.searchsorted(self._hashes, wanted))
        while position < len(self) and self._hashes[position] == wanted:
            class_id = int(self._by_hash[position])
            if self[class_id].name == name:
                return class_id
            position += 1
        return None

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """Return the names most similar to `name`, best first. The list is empty if no name is
        similar.

        Compares the names that contain a third of `name`, because a typing error rarely affects all
        three.
        """
        folded = name[:_MAX_QUERY_CHARACTERS].casefold()
        size = max(1, -(-len(folded) // 3))
        parts = [folded[start : start + size] for start in range(0, len(folded), size)]
        ids = {j for part in parts for j in self.search(part, limit=_CANDIDATES)[0]}
        names = {
            self[j].name[:_MAX_QUERY_CHARACTERS].casefold(): j for j in sorted(ids, reverse=True)
        }
        close = difflib.get_close_matches(folded, names, count, cutoff=0.4)
        return [self[names[each]].name for each in close]

    def search(self, text: str, *, limit: int, offset: int = 0) -> tuple[list[int], int]:
        """Return the IDs of names that contain `text`, ignoring case, and the total number of
        matches.

        Names that start with `text` come first. Within each group, names are in class-list order.
        """
        if not text:
            return list(range(len(self))[offset : offset + limit]), len(self)
        parts = [self._containing(_encoded(text.casefold()), *block) for block in self._blocks()]
        found = np.concatenate([ids for ids, _ in parts])
        begins = np.concatenate([first for _, first in parts])
        ordered = np.concatenate([found[begins], found[~begins]])
        return ordered[offset : offset + limit].tolist(), len(found)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of IDs whose folded names are about `_CHUNK` bytes in total."""
        first, total = 0, len(self)
        while first < total:
            limit = np.int64((self._ends[first - 1] if first else 0) + _CHUNK)
            stop = max(first + 1, int(np.searchsorted(self._ends, limit, side="right")))
            yield first, min(stop, total)
            first = stop

    def _containing(
        self, text: bytes, first: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the IDs, in ascending order, of the names in a block that contain `text`, and
        whether each name starts with it.
        """
        start = self._ends[first - 1] if first else 0
        ends = self._ends[first:stop] - start
        names = self._folded[start : start + ends[-1]]
        found = np.flatnonzero(names[: max(0, len(names) - len(text) + 1)] == text[0])
        for position, byte in enumerate(text[1:], start=1):
            found = found[names[found + position] == byte]
        ids = np.searchsorted(ends, found, side="right")
        inside = found + len(text) <= ends[ids]
        ids, found = ids[inside], found[inside]
        new = np.diff(ids, prepend=-1) != 0  # a name may contain the text more than once
        ids, found = ids[new], found[new]
        starts = np.concatenate([[0], ends[:-1]])
        return ids + first, found == starts[ids]


def _hash(name: str) -> int:
    """Return a 64-bit hash that is the same in every process."""
    digest = hashlib.blake2b(_encoded(name), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _encoded(text: str) -> bytes:
    """Return the text in UTF-8. A client may send lone surrogates, which do not occur in any
    name.
    """
    return text.encode("utf-8", "surrogatepass")


def _number_in(wanted: str) -> int | None:
    """Return the number in a text of the form "#3", or None for other texts."""
    if not (wanted.startswith("#") and wanted[1:].isascii() and wanted[1:].isdigit()):
        return None
    # int() takes quadratic time for long strings of digits and raises ValueError beyond a few
    # thousand digits.
    return int(wanted[1:]) if len(wanted) < 20 else 10**20
