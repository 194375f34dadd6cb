"""Build times of cover trees. `python -m benchmarks.cover_tree` builds one with a million classes.

One tree is built over self-similar vectors (clusters within clusters). The other is built over
clusters without inner structure, which takes longer. The invariants are checked for sampled
classes, each against all classes.
"""

import resource
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows
from heads.tree import CoverTree, build_cover_tree

CLOSE = 1 + 1e-5  # tolerance of the check, which uses float32
ROUNDING = 3e-6
SELF_SIMILAR = "self-similar vectors (clusters of 10 in clusters of 10)"


def clustered(num: int, dim: int, *, seed: int, branching: int = 10, shrink: float = 0.5):
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


def gaussian_clusters(num: int, dim: int, *, seed: int, num_clusters: int = 2000):
    """Return vectors [num, dim] float32: Gaussian clusters around random normal centers.

    The standard deviation of a cluster is half that of the centers.
    """
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(num_clusters, dim)).astype(np.float32)
    noise = rng.normal(size=(num, dim)).astype(np.float32)
    return centers[rng.integers(num_clusters, size=num)] + 0.5 * noise


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


def measured(vectors: np.ndarray, kind: str, at_most: str, *, base: float = 1.3) -> Row:
    """Measure the time to build a V-tree of vectors [K, d], and check its cover tree."""
    (num, dim), started, cpu = vectors.shape, time.perf_counter(), time.process_time()
    cover = build_cover_tree(vectors, base=base)
    tree = cover.vtree()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    found = violations(vectors, cover)
    return Row(
        f"cover tree and V-tree of {kind}",
        f"{num:,} x {dim}, base {base}",
        f"{seconds:.1f} s",
        at_most,
        f"{cpu:.0f} CPU-seconds; {tree.num_nodes - num:,} pseudoclasses, "
        f"{int(cover.level.max()) + 1} levels; on 500 sampled classes: "
        f"{found[0] if found else 'the invariants hold'}",
    )


def rows() -> Iterator[Row]:
    """Build trees of 100,000 classes over vectors with and without self-similarity."""
    yield measured(clustered(100_000, 300, seed=0), SELF_SIMILAR, "<= 60 s")
    clusters = gaussian_clusters(100_000, 300, seed=0)
    yield measured(clusters, "2,000 Gaussian clusters without structure", "<= 60 s")


def main() -> None:
    """Build the tree of one million classes."""
    CONSOLE.print(machine())
    print_rows([measured(clustered(1_000_000, 64, seed=0), SELF_SIMILAR, "<= 15 min")])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    CONSOLE.print(f"peak memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
