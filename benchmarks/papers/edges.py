"""Check whether the best rate of a search is at an edge of its grid.

If it is, a better rate may lie outside the grid.
"""

from collections.abc import Sequence


def is_at_edge(best: float, tried: Sequence[float]) -> bool:
    """Return whether `best` is the smallest or largest of several different numbers tried."""
    return min(tried) < max(tried) and best in (min(tried), max(tried))


def edge_note(found: Sequence[str]) -> str:
    """Return `; best rate at an edge of the grid: ce (0.3)` to append to the evidence of a claim.

    Empty if `found` is empty.
    """
    return f"; best rate at an edge of the grid: {', '.join(found)}" if found else ""
