"""Class names: exact look-up, search as one types, and the nearest names to a misspelt one.

Made for a hundred thousand names and more, so nothing here compares strings one by one
in Python except for a short list of candidates.
"""

import difflib
import itertools
import zlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

_SIGNATURE_WORDS = 4
_CANDIDATES = 200
# Longer strings cost difflib quadratic time and are nobody's misspelling of a class.
_MAX_QUERY_CHARACTERS = 200


class ClassNames:
    """The class list of a model; a class's id is its place in it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._ids = {name: place for place, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def id_of(self, wanted: str | int) -> int:
        """The id of a class by its exact name, or by the id itself: 3 or "#3".

        A name wins over an id. Raises ValueError with the nearest names for an unknown one.
        """
        if isinstance(wanted, str):
            found = self._ids.get(wanted)
            if found is not None:
                return found
            if not (wanted.startswith("#") and wanted[1:].isascii() and wanted[1:].isdigit()):
                raise ValueError(self._unknown(wanted))
            # int() refuses, and takes quadratic time for, thousands of digits.
            wanted = int(wanted[1:]) if len(wanted) < 20 else len(self)
        if not 0 <= wanted < len(self):
            raise ValueError(f"class id {wanted} is not within 0 … {len(self) - 1}")
        return wanted

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """The names most like `name`, best first; empty when nothing is like it.

        Names that share most letter pairs with it are found at once by their signatures, and
        only these are compared in full.
        """
        folded = name[:_MAX_QUERY_CHARACTERS].casefold()
        wanted = _signature(folded)
        common = np.bitwise_count(self._signatures & wanted).sum(1, dtype=np.int32)
        either = np.bitwise_count(self._signatures | wanted).sum(1, dtype=np.int32)
        likeness = common / np.maximum(either, 1)
        best = np.argsort(-likeness, kind="stable")[:_CANDIDATES]
        ratio = difflib.SequenceMatcher(b=folded, autojunk=False)
        scored = []
        for place in best:
            ratio.set_seq1(self.names[place][:_MAX_QUERY_CHARACTERS].casefold())
            scored.append((-ratio.ratio(), int(place)))
        return [self.names[place] for score, place in sorted(scored)[:count] if score < -0.4]

    def search(self, text: str, *, limit: int, offset: int = 0) -> tuple[list[int], int]:
        """Ids of the names that contain `text`, whatever the case, and how many there are.

        Names that begin with it come first; within each group the order is the class list's.
        """
        folded = text.casefold()
        found = [place for place, name in enumerate(self._folded) if folded in name]
        found.sort(key=lambda place: not self._folded[place].startswith(folded))
        return found[offset : offset + limit], len(found)

    @cached_property
    def _folded(self) -> list[str]:
        return [name.casefold() for name in self.names]

    @cached_property
    def _signatures(self) -> NDArray[np.uint64]:
        return np.stack([_signature(name) for name in self._folded])

    def _unknown(self, name: str) -> str:
        shown = name if len(name) <= 80 else name[:80] + "…"
        nearest = ", ".join(repr(close) for close in self.nearest(name))
        hint = f"the nearest names are {nearest}" if nearest else "no name is like it"
        return f"there is no class {shown!r}; {hint}"


def _signature(folded: str) -> NDArray[np.uint64]:
    """A set of letter pairs as bits [4] of 64: equal pairs set equal bits in every process."""
    bits = [0] * _SIGNATURE_WORDS
    padded = f"\x02{folded}\x03"
    for pair in itertools.pairwise(padded):
        place = zlib.crc32("".join(pair).encode("utf-8", "surrogatepass")) % (64 * _SIGNATURE_WORDS)
        bits[place // 64] |= 1 << (place % 64)
    return np.array(bits, dtype=np.uint64)
