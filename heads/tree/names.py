"""Find the vector of a class name among named vectors, by the entire name or as a mean over words.

Matching ignores case, U+FE0F (which selects the emoji form of a character), and the difference
between underscores and spaces. If several names match, the one with identical spelling is used.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatVectors = NDArray[np.float32]

_BETWEEN_WORDS = re.compile(r"[\s_,;/()]+")
_INSIDE_WORDS = re.compile(r"[-–'’.]+")


def name_key(name: str) -> str:
    """Return the normalized name; names with the same key match."""
    text = unicodedata.normalize("NFC", name.replace("\ufe0f", "")).casefold()
    return " ".join(text.replace("_", " ").split())


class NameLookup:
    """Collects the vectors of class names and their words from a stream of named vectors."""

    def __init__(self, class_names: Sequence[str]) -> None:
        self._spellings = {form for name in class_names for form in _forms(name)}
        self._keys = {name_key(form) for form in self._spellings} - {""}
        self._by_spelling: dict[str, FloatVectors] = {}
        self._by_key: dict[str, FloatVectors] = {}

    def needs(self, name: str) -> bool:
        """Return whether the vector of `name` is needed and has not been added yet."""
        key = name_key(name)
        if key not in self._keys:
            return False
        return key not in self._by_key or (
            name in self._spellings and name not in self._by_spelling
        )

    def add(self, name: str, vector: FloatVectors) -> None:
        """Add a vector.

        If several names match, the first one is used, because files list frequent words first.
        """
        self._by_key.setdefault(name_key(name), vector)
        if name in self._spellings:
            self._by_spelling.setdefault(name, vector)

    def vector(self, class_name: str) -> FloatVectors | None:
        """Return the vector of the entire name if there is one, otherwise the mean of the vectors
        of its words; None if no word has a vector.

        For a word without a vector, the mean over its parts is used; hyphens, apostrophes and
        periods separate the parts.
        """
        exact = self._find(class_name)
        if exact is not None:
            return exact
        vectors = []
        for word in _words(class_name):
            found = self._find(word)
            if found is None:
                found = _mean([self._find(part) for part in _INSIDE_WORDS.split(word)])
            vectors.append(found)
        return _mean(vectors)

    def _find(self, name: str) -> FloatVectors | None:
        found = self._by_spelling.get(name)
        return self._by_key.get(name_key(name)) if found is None else found


def _mean(vectors: Sequence[FloatVectors | None]) -> FloatVectors | None:
    """Return the mean of the vectors that are not None; None if there are none."""
    known = [vector for vector in vectors if vector is not None]
    return np.stack(known).astype(np.float64).mean(0).astype(np.float32) if known else None


def _words(name: str) -> list[str]:
    return [word for word in _BETWEEN_WORDS.split(name) if word]


def _forms(name: str) -> list[str]:
    words = _words(name)
    return [name, *words, *(part for word in words for part in _INSIDE_WORDS.split(word) if part)]
