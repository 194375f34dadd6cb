"""Finds the vector of a class name among named vectors: by the name itself, or as a mean of words.

Upper and lower case, underscores and spaces, and U+FE0F (which makes a character an emoji) make no
difference, unless the names found differ in nothing else: then the same spelling wins.
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
    """What names have in common that count as the same."""
    text = unicodedata.normalize("NFC", name.replace("\ufe0f", "")).casefold()
    return " ".join(text.replace("_", " ").split())


class NameLookup:
    """Collects, from a stream of named vectors, those that some class names need."""

    def __init__(self, class_names: Sequence[str]) -> None:
        self._spellings = {form for name in class_names for form in _forms(name)}
        self._keys = {name_key(form) for form in self._spellings} - {""}
        self._by_spelling: dict[str, FloatVectors] = {}
        self._by_key: dict[str, FloatVectors] = {}

    def wants(self, name: str) -> bool:
        key = name_key(name)
        if key not in self._keys:
            return False
        return key not in self._by_key or (
            name in self._spellings and name not in self._by_spelling
        )

    def add(self, name: str, vector: FloatVectors) -> None:
        """Keep a vector; of equal names the first counts, as files list frequent words first."""
        self._by_key.setdefault(name_key(name), vector)
        if name in self._spellings:
            self._by_spelling.setdefault(name, vector)

    def vector(self, class_name: str) -> FloatVectors | None:
        """The vector of the whole name, else the mean over those of its words that are known (of a
        word that is not, over its parts between hyphens); None where no word is known."""
        whole = self._find(class_name)
        if whole is not None:
            return whole
        known = [self._word(word) for word in _words(class_name)]
        return _mean(known)

    def _word(self, word: str) -> FloatVectors | None:
        whole = self._find(word)
        if whole is not None:
            return whole
        parts = [self._find(part) for part in _INSIDE_WORDS.split(word)]
        return _mean(parts)

    def _find(self, name: str) -> FloatVectors | None:
        found = self._by_spelling.get(name)
        return self._by_key.get(name_key(name)) if found is None else found


def _mean(vectors: Sequence[FloatVectors | None]) -> FloatVectors | None:
    """Of those that are there; None where none is."""
    known = [vector for vector in vectors if vector is not None]
    return np.stack(known).astype(np.float64).mean(0).astype(np.float32) if known else None


def _words(name: str) -> list[str]:
    return [word for word in _BETWEEN_WORDS.split(name) if word]


def _forms(name: str) -> list[str]:
    words = _words(name)
    return [name, *words, *(part for word in words for part in _INSIDE_WORDS.split(word) if part)]
