"""Uses a bag-of-characters model to find single characters that leak the label in text shards.

A naive Bayes model over the presence of code points is trained on one half of a split and evaluated
on the other. Words are not checked, because a model is expected to learn the label from them.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.loading.order import permuted_index
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.text.emoji_table import PARTS, ZWJ

MIN_TEXTS = 20
MIN_DROP = 0.02
_MIN_DEVIATIONS = 4.0
_MIN_PART_LIFT = 2.0
_MIN_PRECISION, _MIN_LIFT = 0.8, 3.0
_NUM_MEASURED = 64
_MAX_TABLE = 50_000_000  # maximum number of entries in the table of characters x classes
_BLOCK_ENTRIES = 10_000_000


@dataclass(frozen=True)
class CharacterLeak:
    """How much one character reveals about the label, in the evaluated half of the texts.

    texts: the number of texts that contain the character. class_name: the most likely class of
    training texts that contain it. precision: the fraction of `texts` in that class. lift: the
    precision divided by the frequency of the class in all texts. information: the mutual
    information, in bits, with the label. drop: the decrease in the model's accuracy without the
    character. suspect: the reason why the character is suspicious, or None.
    """

    char: str
    texts: int
    class_name: str
    precision: float
    lift: float
    information: float
    drop: float
    suspect: str | None

    @property
    def name(self) -> str:
        """The code point and name of the character, such as `U+FE0F VARIATION SELECTOR-16`."""
        return f"U+{ord(self.char):04X} {unicodedata.name(self.char, 'without a name')}"


@dataclass(frozen=True)
class LeakReport:
    """The result of a leak check.

    accuracy: the accuracy of the model. most_frequent: the accuracy of always predicting the most
    frequent class.
    """

    texts: int
    accuracy: float
    most_frequent: float
    leaks: list[CharacterLeak]

    @property
    def suspects(self) -> list[CharacterLeak]:
        return [leak for leak in self.leaks if leak.suspect is not None]


class _Drop(NamedTuple):
    """The decrease in accuracy without a character.

    deviations: how far the decrease is from chance, in standard deviations, given the number of
    texts whose result changes (McNemar 1947).
    """

    accuracy: float
    deviations: float


@dataclass(frozen=True)
class _Half:
    """One half of the texts.

    chars: the positions of each text's characters in the list of characters. labels: the labels,
    int64 [N].
    """

    chars: list[np.ndarray]
    labels: np.ndarray

    def table(self, num_chars: int, num_classes: int) -> np.ndarray:
        """Return the number of texts of each class that contain each character, float64 [V, K]."""
        where = [
            chars * num_classes + label
            for chars, label in zip(self.chars, self.labels, strict=True)
        ]
        flat = np.concatenate(where) if where else np.empty(0, np.int64)
        counts = np.bincount(flat, minlength=num_chars * num_classes)
        return counts.reshape(num_chars, num_classes).astype(np.float64)


@dataclass(frozen=True)
class _Model:
    """A naive Bayes model over the presence of characters, with the log-probabilities bias [K],
    present [V, K] and absent [V, K].
    """

    bias: np.ndarray
    present: np.ndarray
    absent: np.ndarray

    @classmethod
    def fit(cls, table: np.ndarray, classes: np.ndarray) -> "_Model":
        """Fit the model, smoothed toward each character's overall frequency."""
        overall = table.sum(axis=1, keepdims=True) / classes.sum()
        share = (table + overall + 0.01) / (classes + 1.02)
        absent = np.log1p(-share)
        bias = np.log(classes + 0.5) + absent.sum(axis=0)
        return cls(bias, np.log(share) - absent, absent)


def check_leaks(
    folder: Path | str, *, split: str = "train", limit: int = 100_000, threshold: float = MIN_DROP
) -> LeakReport:
    """Rank the characters of the texts in `folder` by the amount of information that they reveal
    about the label.

    limit: the maximum number of texts, which are chosen by a fixed permutation. One half of them is
    used to train the model, and the other half to evaluate it.

    A character is suspicious in three cases: without it, the accuracy drops by at least `threshold`
    and by at least 4 standard deviations; it is part of an emoji, and its lift is at least 2; or it
    is not a letter, mark or digit, at least 80% of the texts that contain it belong to one class,
    and its lift is at least 3.

    Raises ValueError if the shards do not contain texts, or contain too few.
    """
    manifest = Manifest.load(folder)
    if manifest.modality != "text":
        raise ValueError(f"{folder} contains images: pass a folder of text shards")
    texts, labels, names = _read(folder, manifest, split, limit)
    middle = len(texts) // 2
    chars = _vocabulary(texts[:middle], len(names))
    index = {char: i for i, char in enumerate(chars)}
    learned = _half(texts[:middle], labels[:middle], index)
    measured = _half(texts[middle:], labels[middle:], index)
    counts = learned.table(len(chars), len(names))
    classes = np.bincount(learned.labels, minlength=len(names)).astype(np.float64)
    model = _Model.fit(counts, classes)
    candidates = _candidates(chars, counts, classes)
    accuracy, drops = _drops(model, measured, candidates)
    of_class = np.bincount(measured.labels, minlength=len(names)) / len(measured.labels)
    table = measured.table(len(chars), len(names))
    bits = _information(table, of_class * len(measured.labels))
    leaks = []
    for at, drop in zip(candidates, drops, strict=True):
        num, best = int(table[at].sum()), int(counts[at].argmax())
        precision = float(table[at, best]) / max(1, num)
        lift = precision / float(of_class[best]) if of_class[best] else 0.0
        why = _suspicion(chars[at], num, precision, lift, drop, threshold)
        information = float(bits[at])
        leaks.append(
            CharacterLeak(
                chars[at], num, names[best], precision, lift, information, drop.accuracy, why
            )
        )
    leaks.sort(key=lambda leak: (leak.suspect is None, -leak.drop, leak.char))
    return LeakReport(len(texts), accuracy, float(of_class.max()), leaks)


def _read(
    folder: Path | str, manifest: Manifest, split: str, limit: int
) -> tuple[list[str], np.ndarray, list[str]]:
    with open_split(folder, split, manifest=manifest) as opened:
        num = min(len(opened), limit)
        if num < 2 * MIN_TEXTS:
            raise ValueError(
                f"{folder}: split {split!r} has {num} texts: the leak check requires at least "
                f"{2 * MIN_TEXTS}"
            )
        chosen = permuted_index(0, 0, np.arange(num), len(opened))
        texts = [opened.read(i)[0].decode("utf-8", "replace") for i in chosen.tolist()]
        return texts, opened.labels[chosen], [info.name for info in opened.classes]


def _vocabulary(texts: Sequence[str], num_classes: int) -> list[str]:
    """Return the characters that occur in enough texts, most frequent first, up to the limit of the
    table.
    """
    count = Counter(char for text in texts for char in set(text))
    found = [char for char, num in count.items() if num >= MIN_TEXTS]
    found.sort(key=lambda char: (-count[char], char))
    return found[: max(1, _MAX_TABLE // num_classes)]


def _half(texts: Sequence[str], labels: np.ndarray, index: dict[str, int]) -> _Half:
    return _Half(
        [
            np.array([index[char] for char in set(text) if char in index], np.int64)
            for text in texts
        ],
        labels,
    )


def _candidates(chars: Sequence[str], table: np.ndarray, classes: np.ndarray) -> list[int]:
    """Return the characters to evaluate: the most informative characters, parts of emoji, and those
    with the highest precision.
    """
    purity = table.max(axis=1) / table.sum(axis=1)
    purity = np.where([_is_letter(char) for char in chars], 0, purity)
    found = {i for i, char in enumerate(chars) if char in PARTS or char == ZWJ}
    for order in (_information(table, classes), purity):
        found.update(np.argsort(-order, kind="stable")[:_NUM_MEASURED].tolist())
    return sorted(found)


def _information(table: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the mutual information [V], in bits, between presence and label.

    table: counts [V, K]. classes: counts [K].
    """
    total = classes.sum()

    def bits(counts: np.ndarray) -> np.ndarray:
        """Return the entropy of each row, weighted by the row's fraction of all texts."""
        rows = counts.sum(axis=-1, keepdims=True)
        share = counts / np.maximum(rows, 1)
        logs = np.log2(share, out=np.zeros_like(share), where=share > 0)
        return -(share * logs).sum(axis=-1) * rows[..., 0] / total

    return bits(classes[None]) - bits(table) - bits(classes - table)


def _drops(model: _Model, half: _Half, candidates: Sequence[int]) -> tuple[float, list[_Drop]]:
    """Return the accuracy of the model, and the decrease in accuracy when each candidate is
    removed.
    """
    right, lost, won = 0, np.zeros(len(candidates)), np.zeros(len(candidates))
    rows = max(1, _BLOCK_ENTRIES // max(model.present.shape))
    for first in range(0, len(half.labels), rows):
        chars, labels = half.chars[first : first + rows], half.labels[first : first + rows]
        scores = np.stack([model.bias + model.present[one].sum(axis=0) for one in chars])
        hit = scores.argmax(axis=1) == labels
        right += int(hit.sum())
        holds = np.zeros((len(chars), len(model.present)), bool)
        for row, one in enumerate(chars):
            holds[row, one] = True
        for i, at in enumerate(candidates):
            without = scores - holds[:, at, None] * model.present[at] - model.absent[at]
            still = without.argmax(axis=1) == labels
            lost[i] += (hit & ~still).sum()
            won[i] += (still & ~hit).sum()
    num = len(half.labels)
    drops = [
        _Drop(float(a - b) / num, float(a - b) / max(1, a + b) ** 0.5)
        for a, b in zip(lost, won, strict=True)
    ]
    return right / num, drops


def _suspicion(
    char: str, texts: int, precision: float, lift: float, drop: _Drop, threshold: float
) -> str | None:
    if texts < MIN_TEXTS:
        return None
    if drop.accuracy >= threshold and drop.deviations >= _MIN_DEVIATIONS:
        return f"accuracy drops by {drop.accuracy:.3f} without it"
    if (char in PARTS or char == ZWJ) and lift >= _MIN_PART_LIFT:
        return f"part of an emoji, with a lift of {lift:.1f}"
    if precision >= _MIN_PRECISION and lift >= _MIN_LIFT and not _is_letter(char):
        return f"{precision:.0%} of its texts belong to one class"
    return None


def _is_letter(char: str) -> bool:
    """Return whether `char` is a letter, a mark or a digit, and therefore part of a word."""
    return unicodedata.category(char)[0] in "LMN" and char not in PARTS
