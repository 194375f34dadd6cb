"""Whether a search found its best rate at an edge of its grid: a better one may be outside."""

from collections.abc import Sequence


def is_at_edge(best: float, tried: Sequence[float]) -> bool:
    """Whether `best` is the smallest or the largest of several numbers that were tried."""
    return min(tried) < max(tried) and best in (min(tried), max(tried))


def edge_note(found: Sequence[str]) -> str:
    """`; best rate at an edge of the grid: ce (0.3)`, to append to the evidence of a claim; empty
    if `found` names none."""
    return f"; best rate at an edge of the grid: {', '.join(found)}" if found else ""
