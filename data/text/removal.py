"""Takes emoji, and every part of one, out of a text: what stays of one gives the label away."""

import re

from data.text.emoji_table import EMOJI_STYLE, KEYCAP, PARTS
from data.text.joiners import ZWJ, without_letters_joiners, without_stray_joiners

# All parts look alike to the pattern below: a class of 5,000 characters would be walked for each.
_ALIKE = {ord(part): EMOJI_STYLE for part in PARTS - {KEYCAP}}
# A run of emoji with the space around it becomes one space: its length says nothing any more.
_RUN = re.compile(rf"\s*(?:(?:[0-9#*]{EMOJI_STYLE}?{KEYCAP}|[{EMOJI_STYLE}{KEYCAP}])[\s{ZWJ}]*)+")


def remove_emoji(text: str) -> str:
    """`text` without emoji and parts of emoji; a run of them becomes a space, or a line break.

    A keycap goes with its digit. A joiner beside a letter of a joining script stays; everything
    else stays code point by code point.
    """
    if ZWJ not in text and PARTS.isdisjoint(text):
        return text
    text = without_stray_joiners(text).translate(_ALIKE)
    return _RUN.sub(lambda run: "\n" if "\n" in run[0] else " ", text).strip()


def leftovers(text: str) -> list[str]:
    """Parts of emoji in a text, letters' joiners apart; empty after `remove_emoji`."""
    return [char for char in without_letters_joiners(text) if char in PARTS or char == ZWJ]
