"""A class list with lookups by name or ID, searches for a part of a name, and suggestions for
misspelled names.

The case-folded names are two more columns. Every search processes them in chunks of bounded size
and reads only the names that it returns or compares.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.classes.class_list import ClassInfo, ClassList
from data.classes.strings import Strings

# Names that are compared with a misspelled one, for each part of it.
_CANDIDATES = 200
# Bytes of names searched at a time.
_CHUNK = 1 << 22
# difflib takes quadratic time, and a longer string is unlikely to be a misspelled class name.
_MAX_QUERY_CHARACTERS = 200


class SearchableClassList(ClassList):
    """The classes of a model. The ID of a class is its position in the list."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], path: Path | None = None) -> None:
        """columns: those of `ClassList`; the folded names are added if they are missing."""
        if "folded" not in columns:
            names = Strings(columns["names"], columns["name_ends"], path)
            folded = Strings.of(name.casefold() for name in names)
            columns = {**columns, "folded": folded.text, "folded_ends": folded.ends}
        super().__init__(columns, path)
        self._folded = Strings(columns["folded"], columns["folded_ends"], path)

    @classmethod
    def of(cls, infos: Iterable[ClassInfo]) -> "SearchableClassList":
        """Copy classes to new columns, unless they are in columns already. Raises ValueError if two
        classes have the same name.
        """
        listed = infos if isinstance(infos, ClassList) else ClassList.of(infos)
        return cls(listed.columns, listed.names.path)

    @classmethod
    def open(cls, path: Path, num_classes: int | None = None) -> "SearchableClassList":
        return cls(ClassList.open(path, num_classes).columns, path)

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
                name = self.names[number]
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
            self.names[j][:_MAX_QUERY_CHARACTERS].casefold(): j for j in sorted(ids, reverse=True)
        }
        close = difflib.get_close_matches(folded, names, count, cutoff=0.4)
        return [self.names[names[each]] for each in close]

    def search(self, text: str, *, limit: int, offset: int = 0) -> tuple[list[int], int]:
        """Return the IDs of names that contain `text`, ignoring case, and the total number of
        matches.

        Names that start with `text` come first. Within each group, names are in class-list order.
        """
        if not text:
            return list(range(len(self))[offset : offset + limit]), len(self)
        # A client may send lone surrogates, which do not occur in any name.
        wanted = text.casefold().encode("utf-8", "surrogatepass")
        parts = [self._containing(wanted, *block) for block in self._blocks()]
        found = np.concatenate([ids for ids, _ in parts])
        begins = np.concatenate([first for _, first in parts])
        ordered = np.concatenate([found[begins], found[~begins]])
        return ordered[offset : offset + limit].tolist(), len(found)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of IDs whose folded names are about `_CHUNK` bytes in total."""
        first, total = 0, len(self)
        while first < total:
            limit = np.int64((self._folded.ends[first - 1] if first else 0) + _CHUNK)
            stop = max(first + 1, int(np.searchsorted(self._folded.ends, limit, side="right")))
            yield first, min(stop, total)
            first = stop

    def _containing(
        self, text: bytes, first: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the IDs, in ascending order, of the names in a block that contain `text`, and
        whether each name starts with it.
        """
        start = self._folded.ends[first - 1] if first else 0
        ends = self._folded.ends[first:stop] - start
        names = self._folded.text[start : start + ends[-1]]
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


def _number_in(wanted: str) -> int | None:
    """Return the number in a text of the form "#3", or None for other texts."""
    if not (wanted.startswith("#") and wanted[1:].isascii() and wanted[1:].isdigit()):
        return None
    # int() takes quadratic time for long strings of digits and raises ValueError beyond a few
    # thousand digits.
    return int(wanted[1:]) if len(wanted) < 20 else 10**20
