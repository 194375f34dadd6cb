"""How long a cover tree takes: `python -m benchmarks.cover_tree [--million]`.

Builds trees over a random hierarchy of clusters, times them, and checks the invariants of each on
sampled classes, every one of them against all classes.
"""

import argparse
import platform
import resource
import time

import numpy as np

from heads.tree import CoverTree, LabelTree, build_cover_tree

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


def measure(num: int, dim: int, base: float, seed: int) -> None:
    rows = clustered(num, dim, seed=seed)
    started = time.perf_counter()
    cover = build_cover_tree(rows, base=base)
    built = time.perf_counter()
    tree = cover.vtree()
    seconds = time.perf_counter() - built
    found = violations(rows, cover)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{num:,} x {dim}: cover tree {built - started:.1f} s, vtree {seconds:.1f} s")
    print(f"  {_shape_of(tree)}, {int(cover.level.max()) + 1} levels of base {base}")
    print(f"  invariants on 500 sampled classes: {found or 'hold'}; peak memory {peak:.1f} GB")


def _shape_of(tree: LabelTree) -> str:
    pseudoclasses = tree.num_nodes - tree.num_classes
    return f"{tree.num_nodes:,} nodes, {pseudoclasses:,} pseudoclasses, depth {tree.depth.max()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also 1,000,000 x 64")
    parser.add_argument("--base", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{platform.machine()}, {platform.system()}, numpy {np.__version__}")
    measure(100_000, 300, args.base, args.seed)
    if args.million:
        measure(1_000_000, 64, args.base, args.seed)


if __name__ == "__main__":
    main()
