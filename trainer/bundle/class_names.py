"""Class names: exact lookup, incremental search, and suggestions for misspelled names.

The module is designed for millions of names on disk. Every operation processes arrays in chunks of
bounded size and reads only the names that it returns or compares.
"""

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CANDIDATES = 200
# The number of names whose lookups are cached.
_MAX_FOUND = 4096
# Bytes of names searched at a time.
_CHUNK = 1 << 22
# difflib takes quadratic time, and a longer string is unlikely to be a misspelled class name.
_MAX_QUERY_CHARACTERS = 200


@dataclass(frozen=True)
class NameIndex:
    """The search index of K names, created once when the names are written.

    `folded` contains the concatenated case-folded names in UTF-8, and `ends` [K] contains the end
    of each name. `hashes` [K] is in ascending order, and `by_hash` [K] contains the class ID of
    each hash.
    """

    folded: NDArray[np.uint8]
    ends: NDArray[np.int64]
    hashes: NDArray[np.int64]
    by_hash: NDArray[np.int32]


def index_names(names: Sequence[str]) -> NameIndex:
    """Return the index of `names`. Raises ValueError for a duplicate name."""
    folded = [name.casefold().encode() for name in names]
    ends = np.cumsum(np.fromiter(map(len, folded), np.int64, len(folded)), dtype=np.int64)
    hashes = np.fromiter(map(_hash, names), np.int64, len(names))
    by_hash = np.argsort(hashes, kind="stable").astype(np.int32)
    hashes = hashes[by_hash]
    _check_distinct(names, hashes, by_hash)
    return NameIndex(np.frombuffer(b"".join(folded), np.uint8), ends, hashes, by_hash)


class ClassNames:
    """The class list of a model. The ID of a class is its index in the list."""

    def __init__(self, names: Sequence[str], index: NameIndex | None = None) -> None:
        self.names = names
        self._index = index if index is not None else index_names(names)
        self._found: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

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
                raise ValueError(
                    f"{wanted!r} is both the name of class {named} and the ID of class "
                    f"{self.names[number]!r}: use '#{named}' or {self.names[number]!r}"
                )
            if named is not None:
                return named
            if number is None:
                raise ValueError(self._unknown(wanted))
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
        position = int(np.searchsorted(self._index.hashes, wanted))
        while position < len(self) and self._index.hashes[position] == wanted:
            class_id = int(self._index.by_hash[position])
            if self.names[class_id] == name:
                return class_id
            position += 1
        return None

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """Return the names most similar to `name`, best first. The list is empty if no name is
        similar.

        A fast first pass selects the names that share the most byte pairs with `name`. Only these
        names are compared in full.
        """
        folded = name[:_MAX_QUERY_CHARACTERS].casefold()
        ratio = difflib.SequenceMatcher(b=folded, autojunk=False)
        scored = []
        for position in self._share_most_pairs(_encoded(folded)):
            close = self.names[position]
            ratio.set_seq1(close[:_MAX_QUERY_CHARACTERS].casefold())
            scored.append((-ratio.ratio(), position, close))
        return [close for score, _, close in sorted(scored)[:count] if score < -0.4]

    def search(self, text: str, *, limit: int, offset: int = 0) -> tuple[list[int], int]:
        """Return the IDs of names that contain `text`, ignoring case, and the total number of
        matches.

        Names that start with `text` come first. Within each group, names are in class-list order.
        """
        if not text:
            return list(range(len(self))[offset : offset + limit]), len(self)
        parts = [self._containing(_encoded(text.casefold()), block) for block in self._blocks()]
        found = np.concatenate([ids for ids, _ in parts])
        begins = np.concatenate([first for _, first in parts])
        ordered = np.concatenate([found[begins], found[~begins]])
        return ordered[offset : offset + limit].tolist(), len(found)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of IDs whose folded names are about `_CHUNK` bytes in total."""
        first, total = 0, len(self)
        while first < total:
            limit = np.int64(self._start(first) + _CHUNK)
            stop = max(first + 1, int(np.searchsorted(self._index.ends, limit, side="right")))
            yield first, min(stop, total)
            first = stop

    def _start(self, class_id: int) -> int:
        return int(self._index.ends[class_id - 1]) if class_id else 0

    def _bytes_of(self, block: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the folded names of a block and the end position of each name within it."""
        start = self._start(block[0])
        ends = self._index.ends[block[0] : block[1]] - start
        return self._index.folded[start : start + int(ends[-1])], ends

    def _containing(
        self, text: bytes, block: tuple[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the IDs, in ascending order, of the names in a block that contain `text`, and
        whether each name starts with it.
        """
        names, ends = self._bytes_of(block)
        found = np.flatnonzero(names[: max(0, len(names) - len(text) + 1)] == text[0])
        for position, byte in enumerate(text[1:], start=1):
            found = found[names[found + position] == byte]
        ids = np.searchsorted(ends, found, side="right")
        inside = found + len(text) <= ends[ids]
        ids, found = ids[inside], found[inside]
        new = np.diff(ids, prepend=-1) != 0  # a name may contain the text more than once
        ids, found = ids[new], found[new]
        starts = np.concatenate([[0], ends[:-1]])
        return ids + block[0], found == starts[ids]

    def _share_most_pairs(self, text: bytes) -> list[int]:
        """Return the IDs of the names that have the largest fraction of byte pairs in common with
        `text`.
        """
        if not text:
            return []
        is_wanted = np.zeros(1 << 16, np.bool_)
        is_wanted[_pairs(np.frombuffer(text, np.uint8))] = True
        best: list[tuple[float, int]] = []
        for block in self._blocks():
            likeness = self._likeness(text, is_wanted, block)
            least = -best[-1][0] if len(best) == _CANDIDATES else 0.0
            found = np.flatnonzero(likeness > least)
            top = found[np.argsort(-likeness[found], kind="stable")[:_CANDIDATES]]
            best += [(-float(likeness[position]), block[0] + int(position)) for position in top]
            best = sorted(best)[:_CANDIDATES]
        return [class_id for _, class_id in best]

    def _likeness(
        self, text: bytes, is_wanted: NDArray[np.bool_], block: tuple[int, int]
    ) -> NDArray[np.float32]:
        names, ends = self._bytes_of(block)
        starts = np.concatenate([[0], ends[:-1]])
        common = np.zeros(len(names), np.uint8)
        common[:-1] = is_wanted[_pairs(names)]
        # No pair starts at a name's last byte. Equal first or last bytes count as a common pair.
        common[ends - 1] = names[ends - 1] == text[-1]
        common[starts] += names[starts] == text[0]
        shared = np.add.reduceat(common, starts, dtype=np.int32)
        return (shared / (ends - starts + len(text) + 2 - shared)).astype(np.float32)

    def _unknown(self, name: str) -> str:
        shown = name if len(name) <= 80 else name[:80] + "…"
        nearest = ", ".join(repr(close) for close in self.nearest(name))
        hint = f"the nearest names are {nearest}" if nearest else "no name is similar"
        return f"there is no class {shown!r}; {hint}"


def _hash(name: str) -> int:
    """Return a 64-bit hash that is the same in every process."""
    digest = hashlib.blake2b(_encoded(name), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _encoded(text: str) -> bytes:
    """Return the text in UTF-8. A client may send lone surrogates, which do not occur in any
    name.
    """
    return text.encode("utf-8", "surrogatepass")


def _pairs(text: NDArray[np.uint8]) -> NDArray[np.uint16]:
    first = text[:-1].astype(np.uint16) << np.uint16(8)
    return first | text[1:].astype(np.uint16)


def _check_distinct(
    names: Sequence[str], hashes: NDArray[np.int64], by_hash: NDArray[np.int32]
) -> None:
    same = hashes[1:] == hashes[:-1]
    if same.any():  # usually a duplicate name, rarely a hash collision
        seen: set[str] = set()
        for position in by_hash[np.flatnonzero(np.append(same, False) | np.append(False, same))]:
            if names[position] in seen:
                raise ValueError(f"duplicate class name {names[position]!r}")
            seen.add(names[position])


def _number_in(wanted: str) -> int | None:
    """Return the number in a text of the form "#3", or None for other texts."""
    if not (wanted.startswith("#") and wanted[1:].isascii() and wanted[1:].isdigit()):
        return None
    # int() takes quadratic time for long strings of digits and raises ValueError beyond a few
    # thousand digits.
    return int(wanted[1:]) if len(wanted) < 20 else 10**20
