"""Finds characters that reveal the label of a text, such as a part of an emoji.

For each character, one half of the texts determines the class that is most frequent in the texts
with the character, and the other half measures how often this is their class or, with sets of
labels, one of their classes. Letters, marks and digits are not checked, because a model is expected
to learn the label from words.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.loading.order import permuted_index
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.text.emoji_table import PARTS, ZWJ

MIN_TEXTS, _MAX_TEXTS = 20, 100_000
_MIN_GAIN = 0.02
_MIN_PART_LIFT = 2.0
_MIN_PRECISION, _MIN_LIFT = 0.8, 3.0


@dataclass(frozen=True)
class CharacterLeak:
    """How much one character reveals about the label, in the measured half of the texts.

    texts: the number of texts that contain the character. class_name: the most likely class of
    training texts that contain it. gain: the fraction of all texts whose label the character
    reveals in addition to the most frequent class. suspect: the reason why the character is
    suspicious, or None.
    """

    char: str
    texts: int
    class_name: str
    gain: float
    suspect: str | None

    @property
    def name(self) -> str:
        """The code point and name of the character, such as `U+FE0F VARIATION SELECTOR-16`."""
        return f"U+{ord(self.char):04X} {unicodedata.name(self.char, 'without a name')}"


def check_leaks(folder: Path | str, *, split: str = "train") -> list[CharacterLeak]:
    """Return the characters of the texts in `folder`, suspects first, then by decreasing gain.

    Up to 100,000 texts are read, which are chosen by a fixed permutation. The precision of a
    character is the fraction of the texts with it that belong to its class, and its lift is the
    precision divided by the frequency of the class. A character is suspicious in three cases: its
    gain is at least 0.02; it is part of an emoji, and its lift is at least 2; or its precision is
    at least 80%, and its lift at least 3. Raises ValueError if the shards do not contain texts, or
    too few.
    """
    manifest = Manifest.load(folder)
    if manifest.modality != "text":
        raise ValueError(f"{folder} contains images: pass a folder of text shards")
    with open_split(folder, split, manifest=manifest) as opened:
        num = min(len(opened), _MAX_TEXTS)
        if num < 2 * MIN_TEXTS:
            raise ValueError(
                f"{folder}: split {split!r} has {num} texts: the leak check requires at least "
                f"{2 * MIN_TEXTS}"
            )
        chosen = permuted_index(0, 0, np.arange(num), len(opened))
        texts = [opened.read(i)[0].decode("utf-8", "replace") for i in chosen.tolist()]
        labels = [np.atleast_1d(label).tolist() for label in opened.read_many(chosen)[0]]
    middle = num // 2
    learned = _counts(texts[:middle], labels[:middle])
    measured = _counts(texts[middle:], labels[middle:])
    of_class = np.bincount(
        np.array([*chain.from_iterable(labels[middle:])], np.int64), minlength=len(manifest.classes)
    )
    most_frequent = int(of_class.argmax())
    leaks = []
    for char, (learned_from, classes) in learned.items():
        texts_with, found = measured.get(char, _With(0, Counter()))
        if learned_from + texts_with < MIN_TEXTS or not classes:
            continue
        # Ties go to the lowest label.
        best = min(classes, key=lambda label: (-classes[label], label))
        precision = found[best] / max(1, texts_with)
        lift = precision * (num - middle) / max(1, int(of_class[best]))
        gain = (found[best] - found[most_frequent]) / (num - middle)
        why = _suspicion(char, texts_with, precision, lift, gain)
        leaks.append(CharacterLeak(char, texts_with, manifest.classes[best].name, gain, why))
    return sorted(leaks, key=lambda leak: (leak.suspect is None, -leak.gain, leak.char))


class _With(NamedTuple):
    """The number of texts with a character, in total and of each class."""

    texts: int
    of_class: Counter[int]


def _counts(texts: Sequence[str], labels: Sequence[list[int]]) -> dict[str, _With]:
    """Count the texts with each character that is not part of a word."""
    numbers, classes = Counter[str](), defaultdict[str, Counter[int]](Counter)
    for text, of_text in zip(texts, labels, strict=True):
        for char in set(text):
            # Letters, marks and digits are parts of words.
            if unicodedata.category(char)[0] not in "LMN" or char in PARTS:
                numbers[char] += 1
                classes[char].update(of_text)
    return {char: _With(number, classes[char]) for char, number in numbers.items()}


def _suspicion(char: str, texts: int, precision: float, lift: float, gain: float) -> str | None:
    if texts < MIN_TEXTS // 2:
        return None
    if gain >= _MIN_GAIN and lift >= _MIN_PART_LIFT:
        return f"it reveals the label of {gain:.1%} of the texts"
    if (char in PARTS or char == ZWJ) and lift >= _MIN_PART_LIFT:
        return f"part of an emoji, with a lift of {lift:.1f}"
    if precision >= _MIN_PRECISION and lift >= _MIN_LIFT:
        return f"{precision:.0%} of its texts belong to one class"
    return None
