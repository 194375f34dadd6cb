"""Check whether the best rate of a search is at an edge of its grid.

If it is, a better rate may lie outside the grid.
"""

from collections.abc import Sequence


def is_at_edge(best: float, tried: Sequence[float]) -> bool:
    """Return whether `best` is the smallest or largest of several different numbers tried."""
    return min(tried) < max(tried) and best in (min(tried), max(tried))


def edge_note(found: Sequence[str]) -> str:
    """Return a note for the evidence of a claim; empty if `found` is empty.

    For example: `; the best rate is at an edge of the grid for ce (0.3)`.
    """
    return f"; the best rate is at an edge of the grid for {', '.join(found)}" if found else ""
