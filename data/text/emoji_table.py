"""Emoji data from the `emoji` library and Unicode.

This module finds the emoji in a text, folds them, returns their names and groups, and determines
whether a joiner U+200D belongs to a letter or an emoji. The library does not contain groups and
subgroups. They are in `emoji_groups.tsv`, made from Unicode's emoji-test.txt.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import emoji

ZWJ = "\u200d"

# The blocks are Arabic to Myanmar, Philippine scripts to Vedic extensions, Syloti Nagri to Meetei
# Mayek, Arabic presentation forms, and the Indic scripts and Adlam of the supplementary plane.
_BLOCKS = (
    (0x0600, 0x109F),
    (0x1700, 0x1CFF),
    (0xA800, 0xABFF),
    (0xFB50, 0xFDFF),
    (0xFE70, 0xFEFC),
    (0x10A00, 0x11FFF),
    (0x1E900, 0x1E95F),
)

TEXT_STYLE = "\ufe0e"
EMOJI_STYLE = "\ufe0f"
KEYCAP = "\u20e3"
# A private-use range that Google's phones used for emoji before Unicode encoded them.
_GOOGLE = (0xFE000, 0xFEEFF)
_REGIONAL = ("\U0001f1e6", "\U0001f1ff")
_TONE = re.compile("[\U0001f3fb-\U0001f3ff]")
# Skin tones in names such as thumbs_up_medium_skin_tone and
# handshake_light_skin_tone_dark_skin_tone.
_TONE_IN_NAME = re.compile(r"_(?:no|light|medium-light|medium|medium-dark|dark)_skin_tone")
# The name of a couple with two different skin tones contains this text, but its name without tones
# does not.
_PERSON_PERSON = "_person_person"
_FULLY_QUALIFIED = emoji.STATUS["fully_qualified"]
_COMPONENT = emoji.STATUS["component"]
_DATA: dict[str, dict[str, Any]] = emoji.EMOJI_DATA
# Code points that occur only in emoji. Digits, # and * also occur in text; ZWJ may belong to
# either.
PARTS = frozenset(
    {char for one in _DATA for char in one if not char.isascii() and char != ZWJ}
    | {TEXT_STYLE, EMOJI_STYLE, KEYCAP}
    | {chr(code) for code in range(ord(_REGIONAL[0]), ord(_REGIONAL[1]) + 1)}
    | {chr(code) for code in range(0xE0020, 0xE0080)}
    | {chr(code) for code in range(_GOOGLE[0], _GOOGLE[1] + 1)}
)
OTHER = ("Other", "other")


_LETTERS = "".join(f"{chr(first)}-{chr(last)}" for first, last in _BLOCKS)
# A joiner next to a joining letter belongs to the letter; any other joiner belongs to an emoji.
STRAY_JOINERS = re.compile(f"(?<![{_LETTERS}]){ZWJ}+(?![{_LETTERS}{ZWJ}])")
_SEVERED = re.compile(f"(?<![{_LETTERS}{ZWJ}]){ZWJ}+$")


def find_emoji(text: str) -> list[str]:
    """Return the emoji in a text as written, in order.

    The result excludes lone skin tones and hair components, emoji in text style (followed by
    U+FE0E), and the remainder of a sequence whose beginning is missing (preceded by a joiner
    without an emoji before it).
    """
    if PARTS.isdisjoint(text):
        return []
    found = []
    previous_end = -1
    for match in emoji.emoji_list(text):
        start, end, one = match["match_start"], match["match_end"], match["emoji"]
        severed = start - 1 != previous_end and _SEVERED.search(text, max(0, start - 8), start)
        previous_end = end
        as_text = text[end : end + 1] == TEXT_STYLE
        if not severed and not as_text and _DATA[one]["status"] != _COMPONENT:
            found.append(one)
    return found


def fold(one: str) -> str:
    """Return the fully qualified emoji without skin tone, but with gender and hair.

    >>> fold("👍🏽"), fold("❤"), fold("👩🏽‍🚀")
    ('👍', '❤️', '👩‍🚀')
    """
    return _folded()[one]


def english_name(one: str) -> str:
    """Return the English name, such as `thumbs up` for 👍, with the library's capitalization."""
    return name_in(one, "en")


def name_in(one: str, language: str) -> str:
    """Return the name in one of `emoji.LANGUAGES`. Call `load_languages` first."""
    return str(_DATA[one][language]).strip(":").replace("_", " ")


def load_languages(languages: tuple[str, ...]) -> None:
    """Load the names in these languages.

    Raises ValueError for a language that the library does not support.
    """
    for language in languages:
        if language not in emoji.LANGUAGES:
            raise ValueError(
                f"language {language!r} is not supported by the emoji library: choose from "
                f"{', '.join(emoji.LANGUAGES)}"
            )
        emoji.config.load_language([language])


def fully_qualified() -> list[str]:
    """Return all fully qualified emoji, including skin tones, sorted by code points."""
    return sorted(one for one, about in _DATA.items() if about["status"] == _FULLY_QUALIFIED)


@cache
def _folded() -> dict[str, str]:
    """Map each emoji to its folded form, based on its English name, which contains the skin
    tones.
    """
    plain = {
        about["en"].strip(":"): one
        for one, about in _DATA.items()
        if about["status"] == _FULLY_QUALIFIED and _TONE.search(one) is None
    }
    folded = {}
    for one, about in _DATA.items():
        name = _TONE_IN_NAME.sub("", about["en"].strip(":"))
        if name not in plain:
            name = name.removesuffix(_PERSON_PERSON)
        folded[one] = plain.get(name, one)
    return folded


_TABLE = Path(__file__).with_name("emoji_groups.tsv")


def emoji_group(one: str) -> tuple[str, str]:
    """Return the group and subgroup of a folded emoji: `Smileys & Emotion`, `heart` for ❤️.

    Returns OTHER for an emoji that is not in the table because it is newer.
    """
    return _groups().get(one, OTHER)


@cache
def _groups() -> dict[str, tuple[str, str]]:
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()]
    return {one: (row[0], row[1]) for row in rows if len(row) == 3 for one in row[2].split(" ")}
