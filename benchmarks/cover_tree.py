"""Time and memory to build cover trees of 100,000 and 1,000,000 classes.

The vectors are clusters of clusters, or independent Gaussian vectors.
"""

import time
from collections.abc import Iterator

import numpy as np

from benchmarks.timing import Row, resident, restart_high_water_mark
from heads.tree import build_cover_tree
from launch.terminal import progress
from tests.heads.clustered import clustered

NUM_CLASSES, DIM = 100_000, 300
MANY_CLASSES, MANY_DIM = 1_000_000, 64


def rows() -> Iterator[Row]:
    yield _built(clustered(NUM_CLASSES, DIM, seed=0), "clusters of clusters", "<= 60 s")
    gaussian = np.random.default_rng(0).normal(size=(NUM_CLASSES, DIM)).astype(np.float32)
    yield _built(gaussian, "independent Gaussian vectors", "<= 60 s")
    yield _built(clustered(MANY_CLASSES, MANY_DIM, seed=0), "clusters of clusters", "<= 15 min")


def _built(vectors: np.ndarray, kind: str, at_most: str) -> Row:
    num, dim = vectors.shape
    memory, started, cpu = restart_high_water_mark(), time.perf_counter(), time.process_time()
    with progress("building the tree", "classes") as shown:
        cover = build_cover_tree(vectors, report=shown)
    tree = cover.vtree()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    memory = resident("VmHWM") - memory
    return Row(
        f"cover tree and V-tree of {kind}",
        f"{num:,} x {dim}, base {cover.base}",
        f"{seconds:.1f} s",
        at_most,
        f"{cpu:.0f} CPU-seconds; {memory / vectors.size:.0f} bytes of memory per coordinate "
        f"besides the input; {tree.num_nodes - num:,} pseudoclasses, "
        f"{int(cover.level.max()) + 1} levels",
    )
