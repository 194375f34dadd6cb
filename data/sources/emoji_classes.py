"""Emoji as classes: names, what travels with the class list, and one vector each.

The `emoji` library knows no groups or subgroups of Unicode's emoji-test.txt. What says who is kin
without them: the Unicode block, the base of a sequence, and the words of the English names.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import emoji
import numpy as np

from data.manifest import ClassInfo
from data.sources.name_vectors import name_vectors, split_words
from data.sources.unicode_blocks import block_name
from data.text.emoji_table import EMOJI_STYLE, KEYCAP, english_name, fold
from data.text.joiners import ZWJ
from data.text.word_vectors import read_word2vec

_BLOCKS = (
    (0x3000, 0x303F, "CJK Symbols and Punctuation"),
    (0x3200, 0x32FF, "Enclosed CJK Letters and Months"),
    (0x1F000, 0x1F02F, "Mahjong Tiles"),
    (0x1F0A0, 0x1F0FF, "Playing Cards"),
    (0x1F100, 0x1F1FF, "Enclosed Alphanumeric Supplement"),
    (0x1F200, 0x1F2FF, "Enclosed Ideographic Supplement"),
    (0x1F300, 0x1F5FF, "Miscellaneous Symbols and Pictographs"),
    (0x1F600, 0x1F64F, "Emoticons"),
    (0x1F680, 0x1F6FF, "Transport and Map Symbols"),
    (0x1F780, 0x1F7FF, "Geometric Shapes Extended"),
    (0x1F900, 0x1F9FF, "Supplemental Symbols and Pictographs"),
    (0x1FA70, 0x1FAFF, "Symbols and Pictographs Extended-A"),
)
_TAG_END = "\U000e007f"


def emoji_classes(labels: Sequence[str]) -> tuple[ClassInfo, ...]:
    """A class an emoji, called as in English; code points are added where that is no name alone.

    Attributes: emoji, block (Unicode), emoji_version, and base where it is a sequence: the emoji
    that it begins with (👩 of 👩‍🚀), "flag" or "keycap".
    """
    repeated = Counter(map(english_name, labels))
    infos = []
    for one in labels:
        name = english_name(one)
        if repeated[name] > 1:
            name = f"{name} ({' '.join(f'U+{ord(char):04X}' for char in one)})"
        infos.append(ClassInfo(name=name, attributes=_attributes(one)))
    return tuple(infos)


def emoji_vectors(labels: Sequence[str], file: Path | None) -> tuple[np.ndarray, list[str]]:
    """float32 [K, D], and the labels that got the mean because the file has no vector for them.

    Without a file, from the words of English names, blocks and bases. With one, an emoji is found
    with or without variation selector and skin tone, and a sequence by the emoji that it begins
    with. ValueError where the file has none of them.
    """
    if file is None:
        return name_vectors([_words(one) for one in labels]), []
    wanted = {key for one in labels for key in _keys(one)}
    found: dict[str, np.ndarray] = {}
    for word, vector in read_word2vec(file):
        if (plain := word.replace(EMOJI_STYLE, "")) in wanted:
            found.setdefault(plain, vector)
    rows = [next((found[key] for key in _keys(one) if key in found), None) for one in labels]
    known = [row for row in rows if row is not None]
    if not known:
        raise ValueError(f"{file} has no vector for any of {len(labels)} emoji: give another file")
    mean = np.mean(known, axis=0)
    missing = [one for one, row in zip(labels, rows, strict=True) if row is None]
    vectors = np.stack([mean if row is None else row for row in rows])
    return vectors.astype(np.float32), missing


def _keys(one: str) -> list[str]:
    """How a file may list an emoji, best first; all without variation selector."""
    folded = fold(one)
    return [key.replace(EMOJI_STYLE, "") for key in (one, folded, folded.split(ZWJ)[0])]


def _attributes(one: str) -> dict[str, str]:
    about = {
        "emoji": one,
        "block": _block(ord(one[0])),
        "emoji_version": str(emoji.EMOJI_DATA[one]["E"]),
    }
    base = _base(one)
    return about if base is None else {**about, "base": base}


def _base(one: str) -> str | None:
    if KEYCAP in one:
        return "keycap"
    if _is_flag(one):
        return "flag"
    first = one.split(ZWJ)[0]
    return fold(first) if ZWJ in one and first in emoji.EMOJI_DATA else None


def _is_flag(one: str) -> bool:
    return "\U0001f1e6" <= one[0] <= "\U0001f1ff" or one.endswith(_TAG_END)


def _words(one: str) -> list[str]:
    about = _attributes(one)
    base = about.get("base", about["block"])
    return [*split_words(english_name(one)), f"block {about['block']}", f"base {base}"]


def _block(code: int) -> str:
    for first, last, name in _BLOCKS:
        if first <= code <= last:
            return name
    return block_name(code)
