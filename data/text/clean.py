"""What becomes of a tweet's text: no emoji, user names and addresses hidden, the rest untouched.

No lower-casing, no normalisation of Unicode, no splitting into words.
"""

import re
from dataclasses import dataclass
from typing import Literal

from data.text.removal import remove_emoji

What = Literal["replace", "remove", "keep"]

# Not within an address of mail; letters of other scripts may stand right before.
_USER = re.compile(r"(?<![A-Za-z0-9_.+-])[@＠][A-Za-z0-9_]+")
_URL = re.compile(r"(?i)https?://t\.co/[a-z0-9]+|(?<![a-z0-9])(?:https?://|www\.)\S+")
# Before RT or the name, doubled as in a CSV cell or not: what Unicode lists as Quotation_Mark,
# accents used instead of them, and the ornaments U+275B to U+275E, U+276E and U+276F.
_QUOTES = "\"'`´«»‘’‚‛“”„‟‹›❛❜❝❞❮❯⹂「」『』〝〞〟﹁﹂﹃﹄＂＇｢｣"
_RETWEET = re.compile(rf"[\s{_QUOTES}]*RT(?=[\s{_QUOTES}])[\s{_QUOTES}]*[@＠][A-Za-z0-9_]+")
_PLACEHOLDER = re.compile(r"@user|https?\b")


@dataclass(frozen=True)
class Cleaning:
    """users, urls: "replace" writes `@user` and `http`, "remove" nothing, "keep" leaves them."""

    users: What = "replace"
    urls: What = "replace"

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


def _hide(pattern: re.Pattern[str], text: str, what: What, instead: str) -> str:
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
