"""A cover tree over label vectors (Beygelzimer, Kakade and Langford 2006), built level by level.

It groups classes whose vectors are close. `utree` and `vtree` convert it to the label trees of
sections 4.1 and 4.2 of paper 000.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from threadpoolctl import threadpool_limits

from heads.tree.label_tree import IntArray, LabelTree, preorder
from heads.tree.net import Net
from heads.tree.tiles import FloatArray

Metric = Literal["cosine", "euclidean"]

_PART_VALUES = 1 << 22  # coordinates per temporary array


@dataclass(frozen=True, eq=False)
class CoverTree:
    """A tree in which the distance from a class to its parent satisfies `distance * scale <=
    base ** -level`.

    `center_parent` [K] is -1 for the root; `level` [K] is the level at which a class first appears
    (0 for the root). The classes with `level <= l` form the net of level l. With distances
    multiplied by `scale`, its members are more than `base ** -(l + 1)` apart, and every class is
    within that distance of a member. Classes whose vector equals that of their parent up to
    rounding are on one extra level below all others.
    """

    center_parent: IntArray
    level: IntArray
    base: float
    scale: float
    root: int

    def utree(self) -> LabelTree:
        """Return the label tree whose nodes are the classes (section 4.1 of paper 000)."""
        return LabelTree.from_parents(self.center_parent, np.arange(len(self.center_parent)))

    def vtree(self) -> LabelTree:
        """Return the label tree with classes as leaves and pseudoclasses as inner nodes (section
        4.2 of paper 000).

        In the explicit tree, the children of (c, l) are (c, l + 1) and the classes that first
        appear at level l + 1 with parent c. Each (c, l) with two or more children becomes a
        pseudoclass, so there are fewer than 2K nodes.
        """
        parents, centers = self._explicit()
        classes = np.append(np.arange(len(self.level)), np.full(len(centers), -1))
        return LabelTree.from_parents(parents, classes)

    def pseudoclass_centers(self) -> IntArray:
        """Return the class at the center of each pseudoclass of `vtree`, in node order."""
        parents, centers = self._explicit()
        walk = preorder(parents)
        return centers[walk[walk >= len(self.level)] - len(self.level)]

    def _explicit(self) -> tuple[IntArray, IntArray]:
        """Return the parents of the classes and then of the pseudoclasses, and the centers of the
        pseudoclasses."""
        num_classes = len(self.center_parent)
        newcomers = np.flatnonzero(self.center_parent >= 0)
        num_levels = int(self.level.max()) + 1
        host = self.center_parent[newcomers] * num_levels + self.level[newcomers] - 1
        # Pairs are sorted by center, then by level, so the previous pair with the same center is
        # the closest one above.
        pairs, host = np.unique(host, return_inverse=True)
        center = pairs // num_levels
        # The pseudoclass in which each class first appears.
        above = np.full(num_classes, -1, np.int64)
        above[newcomers] = num_classes + host
        pseudoclasses = num_classes + np.arange(len(center))
        is_shallowest = np.diff(center, prepend=-1) != 0
        pseudo_parent = np.where(is_shallowest, above[center], pseudoclasses - 1)
        class_parent = above.copy()
        is_deepest = np.diff(center, append=-1) != 0
        class_parent[center[is_deepest]] = pseudoclasses[is_deepest]
        return np.concatenate([class_parent, pseudo_parent]), center


def build_cover_tree(
    vectors: ArrayLike,
    *,
    base: float = 1.3,
    metric: Metric = "cosine",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> CoverTree:
    """Build the cover tree of label vectors [K, d], with as many threads as torch uses. The result
    is deterministic and does not depend on the number of threads.

    The metric `cosine` compares rows scaled to unit length (zero rows remain zero); `euclidean`
    compares the unscaled rows. The root is the row closest to the mean. Level by level, classes
    that the net does not cover are added to it, starting with the farthest of a block of
    candidates. If all candidates fit in one block, this is farthest-first traversal (Gonzalez
    1985). The parent of a class is the nearest class of the net one level above. Ties go to the
    lowest class ID; ties between parents go to the one that was added first. Classes are treated as
    equal if their distance is below the rounding error of the dtype of the vectors.

    All decisions are based on float64 distances. For clustered vectors, the time is far below
    O(K^2 d). Without clusters, it is that of float32 matrix products with K^2 d / 2
    multiply-adds. Besides the input, the construction needs up to 18 bytes per coordinate and about
    20 MB per thread. `report(done, total)` is called with the number of classes in the tree.

    Raises ValueError for a base outside 1.001..1000, an empty or non-finite matrix, or an unknown
    metric.
    """
    if not 1.001 <= base <= 1000:
        raise ValueError(f"base is {base}: pass a value from 1.001 to 1000, such as 1.3")
    # Each product uses one thread, and several products run at a time. With several threads per
    # product, threads waiting for each other made building a tree of 100,000 vectors 10 times
    # slower on a busy machine.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads, threadpool_limits(1, "blas"):
        points, unit, resolution = _points(vectors, metric)
        mean = points.mean(0)
        parts = np.array_split(points, math.ceil(points.size / _PART_VALUES))
        central = np.argmin(np.concatenate([np.square(part - mean).sum(1) for part in parts]))
        net = Net(points, int(central), threads, report)
        tree = _build(net, base, unit, resolution)
    report(len(points), len(points))
    return tree


def _build(net: Net, base: float, unit: float, resolution: float) -> CoverTree:
    diameter = net.widest_gap()
    # Level l covers gaps in (limits[l], limits[l - 1]].
    # The deepest level whose gaps all exceed the resolution; 0 if there is none.
    num_levels = 0
    if diameter > resolution:
        num_levels = max(1, math.floor(math.log(diameter / resolution) / math.log(base)))
    limits = diameter * base ** -np.arange(num_levels + 1.0)
    level = np.zeros(len(net.gaps), np.int64)
    while (gap := net.widest_gap()) > limits[-1]:
        current = int(np.searchsorted(-limits, -gap, side="right"))
        level[net.refine(limits[current])] = current
    parent, twins = net.parent.copy(), net.outside()
    parent[twins], level[twins] = net.nearest[twins], level.max() + 1
    root = int(parent.argmin())
    scale = 1.0 / (base * diameter * unit) if diameter > 0 else 1.0
    return CoverTree(parent, level, base, scale, root)


def _points(vectors: ArrayLike, metric: Metric) -> tuple[FloatArray, float, float]:
    """Return the rows to compare [K, d], their unit of length, and the rounding error of a
    distance."""
    given = np.asarray(vectors)
    if given.ndim != 2 or 0 in given.shape or given.dtype.kind not in "fiu":
        raise ValueError(
            f"label vectors have shape {given.shape} and dtype {given.dtype}: "
            "pass real numbers of shape [classes, dim]"
        )
    rows = given.astype(np.float64)
    broken = np.flatnonzero(~np.isfinite(rows).all(1))
    if broken.size:
        raise ValueError(
            f"the label vector of class {broken[0]} contains NaN or infinity: fix it, or set it to "
            "zeros"
        )
    unit = 1.0
    match metric:
        case "cosine":
            # Divide by the largest entry first: squares of very large or small entries would
            # overflow or underflow.
            _divide(rows, np.abs(rows).max(1, keepdims=True))
            _divide(rows, np.linalg.norm(rows, axis=1, keepdims=True))
        case "euclidean":
            unit = float(np.abs(rows).max()) or 1.0
            rows /= unit
        case _:
            raise ValueError(f"metric is {metric!r}: use cosine or euclidean")
    eps = np.finfo(given.dtype if given.dtype.kind == "f" else np.float64).eps
    return rows, unit, 4 * float(eps) * float(np.linalg.norm(rows, axis=1).max())


def _divide(rows: FloatArray, by: FloatArray) -> None:
    """Divide in place, unless the divisor is 0, in which case all rows are zero."""
    np.divide(rows, by, out=rows, where=by > 0)
