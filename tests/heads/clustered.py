"""Clustered label vectors."""

import numpy as np


def clustered(
    num: int, dim: int, *, seed: int, branching: int = 10, shrink: float = 0.5
) -> np.ndarray:
    """Return vectors [num, dim] float32: nested clusters, each level scaled by `shrink`."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((1, dim), np.float32)
    width = 1.0
    while len(rows) < num:
        rows = (
            np.repeat(rows, branching, axis=0)
            if len(rows) * branching < num
            else rows[rng.integers(0, len(rows), num)]
        )
        rows = rows + width * rng.normal(size=rows.shape).astype(np.float32)
        width *= shrink
    return rows[rng.permutation(num)]
