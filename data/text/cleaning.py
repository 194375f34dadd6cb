"""What becomes of a tweet's text: no emoji, user names and addresses hidden, the rest untouched.

No lower-casing, no normalization of Unicode, no splitting into words. Every part of an emoji is
removed: what stays of one gives the label away.
"""

import re
from dataclasses import dataclass
from typing import Literal

from data.text.emoji_table import (
    EMOJI_STYLE,
    KEYCAP,
    PARTS,
    ZWJ,
    without_letters_joiners,
    without_stray_joiners,
)

# All parts look alike to the pattern below: a class of 5,000 characters would be walked for each.
_ALIKE = {ord(part): EMOJI_STYLE for part in PARTS - {KEYCAP}}
# A run of emoji with the space around it becomes one space: its length says nothing any more.
_RUN = re.compile(rf"\s*(?:(?:[0-9#*]{EMOJI_STYLE}?{KEYCAP}|[{EMOJI_STYLE}{KEYCAP}])[\s{ZWJ}]*)+")
Replacement = Literal["replace", "remove", "keep"]
# Not within an address of mail; letters of other scripts may stand right before.
_USER = re.compile(r"(?<![A-Za-z0-9_.+-])[@＠][A-Za-z0-9_]+")
_URL = re.compile(r"(?i)https?://t\.co/[a-z0-9]+|(?<![a-z0-9])(?:https?://|www\.)\S+")
# Before RT or the name, doubled as in a CSV cell or not: what Unicode lists as Quotation_Mark,
# accents used instead of them, and the ornaments U+275B to U+275E, U+276E and U+276F.
_QUOTES = "\"'`´«»‘’‚‛“”„‟‹›❛❜❝❞❮❯⹂「」『』〝〞〟﹁﹂﹃﹄＂＇｢｣"
_RETWEET = re.compile(rf"[\s{_QUOTES}]*RT(?=[\s{_QUOTES}])[\s{_QUOTES}]*[@＠][A-Za-z0-9_]+")
_PLACEHOLDER = re.compile(r"@user|https?\b")


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


@dataclass(frozen=True)
class Cleaning:
    """users, urls: "replace" writes `@user` and `http`, "remove" nothing, "keep" leaves them."""

    users: Replacement = "replace"
    urls: Replacement = "replace"

    def clean(self, text: str) -> str:
        """The text as it goes into the shards; "" where nothing but names and addresses is left."""
        # Emoji first: one that is glued to an address is no part of it.
        text = remove_emoji(text)
        text = _hide(_URL, text, self.urls, "http")
        text = _hide(_USER, text, self.users, "@user").strip()
        return text if _PLACEHOLDER.sub("", text).strip() else ""


def is_retweet(text: str) -> bool:
    """Whether the text begins like a retweet: `RT @name`, with or without quotation marks."""
    return _RETWEET.match(text) is not None


def _hide(pattern: re.Pattern[str], text: str, what: Replacement, instead: str) -> str:
    match what:
        case "keep":
            return text
        case "replace":
            return pattern.sub(instead, text)
        case "remove":
            # With the space before it, so that none is doubled.
            return re.sub(
                rf"[^\S\n]?(?:{pattern.pattern.removeprefix('(?i)')})",
                "",
                text,
                flags=pattern.flags,
            )
