"""Cleans the text of a tweet by removing emoji and masking user names and URLs.

In particular, text is not lower-cased, normalized or split into words. Every part of an emoji is
removed, because any remaining part would leak the label.
"""

import re

from data.text.emoji_table import (
    EMOJI_STYLE,
    KEYCAP,
    PARTS,
    STRAY_JOINERS,
    ZWJ,
)

# All parts are first mapped to a single character, because matching a character class with 5,000
# members is slow.
_UNIFIED = {ord(part): EMOJI_STYLE for part in PARTS - {KEYCAP}}
# A run of emoji and the surrounding space becomes one space, so that the length of the run does not
# leak.
_RUN = re.compile(rf"\s*(?:(?:[0-9#*]{EMOJI_STYLE}?{KEYCAP}|[{EMOJI_STYLE}{KEYCAP}])[\s{ZWJ}]*)+")
# A match cannot begin inside an email address, but letters of other scripts may directly precede
# it.
_USER = re.compile(r"(?<![A-Za-z0-9_.+-])[@＠][A-Za-z0-9_]+")
_URL = re.compile(r"(?i)https?://t\.co/[a-z0-9]+|(?<![a-z0-9])(?:https?://|www\.)\S+")
# Quotation marks: Unicode's Quotation_Mark characters, accents that are used instead of them, and
# the ornaments U+275B to U+275E, U+276E and U+276F. They may precede RT or the name, and may be
# doubled as in a CSV cell.
_QUOTES = "\"'`´«»‘’‚‛“”„‟‹›❛❜❝❞❮❯⹂「」『』〝〞〟﹁﹂﹃﹄＂＇｢｣"
_RETWEET = re.compile(rf"[\s{_QUOTES}]*RT(?=[\s{_QUOTES}])[\s{_QUOTES}]*[@＠][A-Za-z0-9_]+")
_PLACEHOLDER = re.compile(r"@user|https?\b")


def remove_emoji(text: str) -> str:
    """Return `text` without emoji and their parts. A run becomes a space or a line break.

    A keycap is removed with its digit. A joiner next to a letter of a joining script is kept. All
    other code points are unchanged.
    """
    if ZWJ not in text and PARTS.isdisjoint(text):
        return text
    text = STRAY_JOINERS.sub("", text).translate(_UNIFIED)
    return _RUN.sub(lambda run: "\n" if "\n" in run[0] else " ", text).strip()


def clean(text: str) -> str:
    """Return the text for the shards, with user names replaced by `@user` and URLs by `http`, or ""
    if it contains only these.
    """
    # Remove emoji first, because an emoji directly after a URL is not part of the URL.
    text = _USER.sub("@user", _URL.sub("http", remove_emoji(text))).strip()
    return text if _PLACEHOLDER.sub("", text).strip() else ""


def is_retweet(text: str) -> bool:
    """Return whether the text begins like a retweet: `RT @name`, with or without quotation
    marks.
    """
    return _RETWEET.match(text) is not None
