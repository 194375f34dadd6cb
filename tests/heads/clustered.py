"""Clustered label vectors, and a check of the invariants of a cover tree of many classes."""

import numpy as np

from heads.tree import CoverTree

CLOSE = 1 + 1e-5  # tolerance of the check, which uses float32
ROUNDING = 3e-6


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


def violations(
    rows: np.ndarray, tree: CoverTree, *, num_sampled: int = 500, seed: int = 0
) -> list[str]:
    """Return the violated invariants of a cosine tree for sampled classes.

    For each sampled class, checks nesting, separation and covering at every level against all
    classes. Also checks that its parent is within base^-level and is the nearest class in the net
    above. Distances are computed with a different formula than the one used by the tree.
    """
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    by_level = np.argsort(tree.level, kind="stable")
    level = tree.level[by_level]
    net_sizes = np.searchsorted(level, np.arange(level[-1] + 1), side="right")
    found = []
    for i in np.random.default_rng(seed).permutation(len(rows))[:num_sampled]:
        squares = np.zeros(len(rows), np.float32)
        for start in range(0, len(rows), 1 << 16):
            part = slice(start, start + (1 << 16))
            squares[part] = np.square(unit[part] - unit[i]).sum(1)
        scaled = np.sqrt(squares) * tree.scale
        nearest = np.minimum.accumulate(scaled[by_level])[net_sizes - 1]
        radii = tree.base ** -(np.arange(len(nearest)) + 1.0)
        own, parent = int(tree.level[i]), int(tree.center_parent[i])
        tolerance = ROUNDING * tree.scale
        twins = own == tree.level.max() and scaled[parent] <= tolerance
        if (nearest > radii * CLOSE + tolerance)[: own + (not twins)].any():
            found.append(f"class {i} is not covered")
        others = scaled[by_level[: net_sizes[own]]][by_level[: net_sizes[own]] != i]
        if not twins and others.size and others.min() * CLOSE + tolerance <= radii[own]:
            found.append(f"class {i} is not separated")
        if i == tree.root:
            continue
        if tree.level[parent] >= own:
            found.append(f"class {i} appears before its parent")
        if scaled[parent] > min(tree.base**-own, nearest[own - 1]) * CLOSE + tolerance:
            found.append(f"the parent of class {i} is too far away, or not the nearest one")
    return found
