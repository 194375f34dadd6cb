"""Build times of cover trees: `python -m benchmarks.cover_tree [SECTION ...] [--words FILE]`.

Trees of 100,000 classes are built from self-similar vectors (clusters within clusters), from
Gaussian clusters, from word vectors and from independent Gaussian vectors. The largest tree has a
million classes. The invariants are checked for sampled classes, each against all classes.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peak_memory import resident, restart_high_water_mark
from benchmarks.report import Sections, command_line, report
from benchmarks.timing import Row
from heads.tree import CoverTree, build_cover_tree, read_label_vectors
from launch.terminal import progress

CLOSE = 1 + 1e-5  # tolerance of the check, which uses float32
ROUNDING = 3e-6
SELF_SIMILAR = "self-similar vectors (clusters of 10 in clusters of 10)"
NUM_CLASSES, DIM, AT_MOST = 100_000, 300, "<= 60 s"


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
    """Measure the time and memory to build a V-tree of vectors [K, d], and check its cover tree."""
    num, dim = vectors.shape
    memory, started, cpu = restart_high_water_mark(), time.perf_counter(), time.process_time()
    with progress("building the tree", "classes") as shown:
        cover = build_cover_tree(vectors, base=base, report=shown)
    tree = cover.vtree()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    memory = resident("VmHWM") - memory
    found = violations(vectors, cover)
    return Row(
        f"cover tree and V-tree of {kind}",
        f"{num:,} x {dim}, base {base}",
        f"{seconds:.1f} s",
        at_most,
        f"{cpu:.0f} CPU-seconds; {memory / vectors.size:.0f} bytes of memory per coordinate "
        f"besides the input; {tree.num_nodes - num:,} pseudoclasses, "
        f"{int(cover.level.max()) + 1} levels; on 500 sampled classes: "
        f"{found[0] if found else 'the invariants hold'}",
    )


def self_similar() -> Iterator[Row]:
    yield measured(clustered(NUM_CLASSES, DIM, seed=0), SELF_SIMILAR, AT_MOST)


def gaussian() -> Iterator[Row]:
    vectors = gaussian_clusters(NUM_CLASSES, DIM, seed=0)
    yield measured(vectors, "vectors in 2,000 Gaussian clusters", AT_MOST)


def unstructured() -> Iterator[Row]:
    vectors = np.random.default_rng(0).normal(size=(NUM_CLASSES, DIM)).astype(np.float32)
    yield measured(vectors, "independent Gaussian vectors", AT_MOST)


def words(path: Path | None) -> Iterator[Row]:
    """Build the tree of the first vectors of a file in one of the formats of `kway tree build`."""
    if path is None:
        what = "cover tree and V-tree of word vectors"
        yield Row(what, "", "not measured", AT_MOST, "pass the word vectors with --words FILE")
    else:
        vectors = read_label_vectors(path)[1][:NUM_CLASSES]
        yield measured(vectors, f"the word vectors in {path.name}", AT_MOST)


def million() -> Iterator[Row]:
    yield measured(clustered(1_000_000, 64, seed=0), SELF_SIMILAR, "<= 15 min")


def rows() -> Iterator[Row]:
    """Build trees of 100,000 classes from generated vectors."""
    for section in (self_similar, gaussian, unstructured):
        yield from section()


def main() -> None:
    parser = command_line("cover_tree", __doc__)
    parser.add_argument("--words", type=Path, metavar="FILE", help="word vectors to measure")
    options = parser.parse_args()
    sections: Sections = {
        "self_similar": self_similar,
        "gaussian": gaussian,
        "words": partial(words, options.words),
        "unstructured": unstructured,
        "million": million,
    }
    report(options, sections)


if __name__ == "__main__":
    main()
