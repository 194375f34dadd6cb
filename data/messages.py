"""What messages for a person are made of: counts, names from files, and progress."""

import unicodedata
from collections.abc import Callable

Report = Callable[[int, int], None]
"""Called with the progress of a long operation: how much is done, and the total."""

# Controls, halves of surrogate pairs, and what ends a line.
_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# What changes the direction of the text after it.
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def silent(done: int, total: int) -> None:
    """A `Report` that does nothing."""


def one_line(error: object, limit: int = 300) -> str:
    """The text of an error on one line, cut to `limit` characters; its type if it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def counted(number: int, what: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def printable(text: str) -> str:
    """One line that is harmless to a terminal, whatever names from files stand in it.

    Line breaks, controls, halves of surrogate pairs and marks of direction become `U+001B`.
    """
    return "".join(f"U+{ord(char):04X}" if _is_harmful(char) else char for char in text)


def _is_harmful(char: str) -> bool:
    return (
        unicodedata.category(char) in _CATEGORIES or unicodedata.bidirectional(char) in _DIRECTIONS
    )
