"""Parts of messages: counts, names from files, commands, progress and remedies."""

import shlex
import unicodedata
from collections.abc import Callable

Report = Callable[[int, int], None]
"""A callback for the progress of a long operation: (done, total)."""

SHARD_AGAIN = "run kway shard again (or kway shard index, for tars from another source)"

# Control characters, unpaired surrogates and line separators.
_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
# Characters that change the direction of the text that follows them.
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


def silent(done: int, total: int) -> None:
    """A `Report` that does nothing."""


def one_line(error: object, limit: int = 300) -> str:
    """Return the text of an error, or its type if it has no text, on one line of up to `limit`
    characters.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


def shown(value: object, limit: int = 60) -> str:
    """Return a value from a file for a message: quoted, on one line, and cut if it is long."""
    if isinstance(value, str):
        return repr(value if len(value) <= limit else value[:limit] + "…")
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def pluralize(number: int, what: str) -> str:
    """Return a count with its noun, such as `1 shard` or `2,000 shards`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def kway_command(*words: object) -> str:
    """Return a `kway` command line whose words are quoted for the shell."""
    return printable(shlex.join(["kway", *map(str, words)]))


def printable(text: str) -> str:
    """Return one line that is safe to print to a terminal.

    Control characters, surrogates and direction marks become code points such as `U+001B`.
    """
    return "".join(f"U+{ord(char):04X}" if _is_unsafe(char) else char for char in text)


def _is_unsafe(char: str) -> bool:
    return (
        unicodedata.category(char) in _CATEGORIES or unicodedata.bidirectional(char) in _DIRECTIONS
    )
