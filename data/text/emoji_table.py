"""Emoji as the `emoji` library and Unicode know them: which are in a text, their folded form, names
and groups, and where the joiner U+200D belongs to a letter instead of an emoji.

The groups and subgroups, which the library lacks, are in `emoji_groups.tsv`, which `emoji_test.py`
makes.
"""

import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import emoji

ZWJ = "\u200d"

# Arabic to Myanmar, Philippine scripts to Vedic extensions, Syloti Nagri to Meetei Mayek, Arabic
# presentation forms, and the Indic scripts and Adlam of the supplementary plane.
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
# Private use: where Google's telephones had their emoji before Unicode had them.
_GOOGLE = (0xFE000, 0xFEEFF)
_REGIONAL = ("\U0001f1e6", "\U0001f1ff")
_TONE = re.compile("[\U0001f3fb-\U0001f3ff]")
# In names: thumbs_up_medium_skin_tone, handshake_light_skin_tone_dark_skin_tone, …
_TONE_IN_NAME = re.compile(r"_(?:no|light|medium-light|medium|medium-dark|dark)_skin_tone")
# The plain form of a couple of two unlike tones has no name of its own but this one's beginning.
_PERSON_PERSON = "_person_person"
_FULLY_QUALIFIED = emoji.STATUS["fully_qualified"]
_COMPONENT = emoji.STATUS["component"]
_DATA: dict[str, dict[str, Any]] = emoji.EMOJI_DATA
# Every code point that only stands in emoji; digits, # and * are letters of texts, ZWJ may be one.
PARTS = frozenset(
    {char for one in _DATA for char in one if not char.isascii() and char != ZWJ}
    | {TEXT_STYLE, EMOJI_STYLE, KEYCAP}
    | {chr(code) for code in range(ord(_REGIONAL[0]), ord(_REGIONAL[1]) + 1)}
    | {chr(code) for code in range(0xE0020, 0xE0080)}
    | {chr(code) for code in range(_GOOGLE[0], _GOOGLE[1] + 1)}
)
OTHER = ("Other", "other")


def _letters() -> str:
    """Ranges for a character class: letters and marks of `_BLOCKS`."""
    codes = [
        code
        for first, last in _BLOCKS
        for code in range(first, last + 1)
        if unicodedata.category(chr(code))[0] in "LM"
    ]
    starts = [code for i, code in enumerate(codes) if i == 0 or codes[i - 1] != code - 1]
    ends = [code for i, code in enumerate(codes) if codes[i + 1 : i + 2] != [code + 1]]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


_LETTER = _letters()
_AFTER_LETTER = re.compile(f"[{_LETTER}]{ZWJ}*$")
# After a joining letter, or before one, a joiner is the letter's. Elsewhere it is an emoji's.
_STRAY = re.compile(f"(?<![{_LETTER}]){ZWJ}+(?![{_LETTER}{ZWJ}])")
_OF_LETTERS = re.compile(f"(?<=[{_LETTER}]){ZWJ}+|{ZWJ}+(?=[{_LETTER}])")


def follows_a_letter(text: str, position: int) -> bool:
    """Whether what stands before `position` is a joining letter, joiners apart."""
    return _AFTER_LETTER.search(text[max(0, position - 8) : position]) is not None


def without_stray_joiners(text: str) -> str:
    """Without the joiners that no joining letter stands beside."""
    return _STRAY.sub("", text) if ZWJ in text else text


def without_letters_joiners(text: str) -> str:
    """Without the others."""
    return _OF_LETTERS.sub("", text)


def find_emoji(text: str) -> list[str]:
    """The emoji of a text in their order, as they stand there.

    Not counted: a lone skin tone or hair, what is asked to look like text (U+FE0E after it), and
    the rest of a sequence whose beginning is gone (a joiner before it, no emoji before that).
    """
    if PARTS.isdisjoint(text):
        return []
    found = []
    previous_end = -1
    for match in emoji.emoji_list(text):
        start, end, one = match["match_start"], match["match_end"], match["emoji"]
        severed = (
            text[:start].endswith(ZWJ)
            and start - 1 != previous_end
            and not follows_a_letter(text, start)
        )
        previous_end = end
        as_text = text[end : end + 1] == TEXT_STYLE
        if not severed and not as_text and _DATA[one]["status"] != _COMPONENT:
            found.append(one)
    return found


def fold(one: str) -> str:
    """The fully qualified emoji without skin tone; gender is kept, and so is hair.

    >>> fold("👍🏽"), fold("❤"), fold("👩🏽‍🚀")
    ('👍', '❤️', '👩‍🚀')
    """
    return _folded()[one]


def english_name(one: str) -> str:
    """`thumbs up` of 👍; words are lower or upper case as in the library."""
    return name_in(one, "en")


def name_in(one: str, language: str) -> str:
    """The name in one of `emoji.LANGUAGES`; load it with `load_languages` first."""
    return str(_DATA[one][language]).strip(":").replace("_", " ")


def load_languages(languages: tuple[str, ...]) -> None:
    """Make names of these languages known; ValueError for one that the library has not."""
    for language in languages:
        if language not in emoji.LANGUAGES:
            raise ValueError(
                f"the emoji library has no names in {language!r}: "
                f"choose from {', '.join(emoji.LANGUAGES)}"
            )
    # Its signature names a list and a literal type; it takes one name.
    for language in languages:
        emoji.config.load_language(language)


def fully_qualified() -> list[str]:
    """All emoji for keyboards, skin tones included, sorted by code points."""
    return sorted(one for one, about in _DATA.items() if about["status"] == _FULLY_QUALIFIED)


@cache
def _folded() -> dict[str, str]:
    """Emoji -> its folded form, through the English name, which says the tones in words."""
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


TABLE = Path(__file__).with_name("emoji_groups.tsv")


def emoji_group(one: str) -> tuple[str, str]:
    """Group and subgroup of a folded emoji: `Smileys & Emotion` and `heart` of ❤️.

    OTHER for an emoji that is newer than the table.
    """
    return _groups().get(one, OTHER)


@cache
def _groups() -> dict[str, tuple[str, str]]:
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {one: (row[0], row[1]) for row in rows if len(row) == 3 for one in row[2].split(" ")}
