"""Emoji as classes: their names, attributes and vectors.

Similar classes share Unicode's groups, the base of a sequence, and words of the English names.
"""

from collections import Counter
from collections.abc import Sequence

import emoji
import numpy as np

from data.classes.class_list import ClassInfo
from data.shards.hierarchy import PATH, join_path
from data.text.emoji_table import KEYCAP, ZWJ, emoji_group, english_name, fold
from data.text.name_vectors import name_vectors, split_words

_TAG_END = "\U000e007f"


def emoji_classes(labels: Sequence[str]) -> tuple[ClassInfo, ...]:
    """Return one class per emoji, with its English name and, if ambiguous, code points.

    The attributes are emoji, emoji_version, path (Unicode's group and subgroup) and, for sequences,
    base: the first emoji (👩 of 👩‍🚀), "flag" or "keycap".
    """
    repeated = Counter(map(english_name, labels))
    infos = []
    for one in labels:
        name = english_name(one)
        if repeated[name] > 1:
            name = f"{name} ({' '.join(f'U+{ord(char):04X}' for char in one)})"
        infos.append(ClassInfo(name=name, attributes=_attributes(one)))
    return tuple(infos)


def emoji_vectors(labels: Sequence[str]) -> np.ndarray:
    """Return vectors, float32 [K, D], computed from the words in names, groups, subgroups and
    bases.
    """
    return name_vectors([_words(one) for one in labels])


def emoji_spellings(one: str) -> list[str]:
    """Return the keys under which a vector file may list an emoji, best first.

    These are the emoji itself, its folded form, and the first emoji of a sequence.
    """
    folded = fold(one)
    return list(dict.fromkeys((one, folded, folded.split(ZWJ)[0])))


def _attributes(one: str) -> dict[str, str]:
    about = {
        "emoji": one,
        "emoji_version": str(emoji.EMOJI_DATA[one]["E"]),
        PATH: join_path(emoji_group(fold(one))),
    }
    base = _base(one)
    return about if base is None else {**about, "base": base}


def _base(one: str) -> str | None:
    if KEYCAP in one:
        return "keycap"
    if "\U0001f1e6" <= one[0] <= "\U0001f1ff" or one.endswith(_TAG_END):
        return "flag"
    first = one.split(ZWJ)[0]
    return fold(first) if ZWJ in one and first in emoji.EMOJI_DATA else None


def _words(one: str) -> list[str]:
    group, subgroup = emoji_group(fold(one))
    base = _base(one) or subgroup
    return [
        *split_words(english_name(one)),
        f"group {group}",
        f"subgroup {subgroup}",
        f"base {base}",
    ]
