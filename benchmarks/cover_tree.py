"""How long a cover tree takes: `python -m benchmarks.cover_tree` builds that of a million classes.

Trees over a random hierarchy of clusters; their invariants are checked on sampled classes, every
one of them against all classes.
"""

import resource
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows
from heads.tree import CoverTree, build_cover_tree

CLOSE = 1 + 1e-5  # the check measures in float32
ROUNDING = 3e-6


def clustered(num: int, dim: int, *, seed: int, branching: int = 10, shrink: float = 0.5):
    """Vectors [num, dim] float32: clusters in clusters, each level `shrink` as wide."""
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
    """What sampled classes, each measured against all classes, find wrong with a cosine tree.

    Nesting, separation, covering at every level, parents within base^-level and nearest of the net
    above; distances by another formula than the tree's own.
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
            found.append(f"the parent of class {i} is too far, or not the nearest")
    return found


def measured(num: int, dim: int, at_most: str, *, base: float = 1.3, seed: int = 0) -> Row:
    """Seconds to a V-tree, and whether its cover tree is one."""
    vectors = clustered(num, dim, seed=seed)
    started = time.perf_counter()
    cover = build_cover_tree(vectors, base=base)
    tree = cover.vtree()
    seconds = time.perf_counter() - started
    found = violations(vectors, cover)
    return Row(
        "cover tree of clustered vectors, its V-tree included",
        f"{num:,} x {dim}, base {base}",
        f"{seconds:.1f} s",
        at_most,
        f"{tree.num_nodes - num:,} pseudoclasses, {int(cover.level.max()) + 1} levels; on 500 "
        f"sampled classes the invariants {found[0] if found else 'hold'}",
    )


def rows() -> Iterator[Row]:
    """100,000 classes."""
    yield measured(100_000, 300, "<= 60 s")


def main() -> None:
    """A million classes."""
    CONSOLE.print(machine())
    print_rows([measured(1_000_000, 64, "<= 15 min")])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    CONSOLE.print(f"peak memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
