"""A cover tree over label vectors, exact and simple: O(K^2 d) time, O(K d) memory.

It says which classes lie near which; `utree` and `vtree` turn that into the label trees of paper
000, sections 4.1 and 4.2. It reads no files and knows nothing of class names.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heads.tree.label_tree import IntArray, LabelTree

FloatArray = NDArray[np.float64]
Metric = Literal["cosine", "euclidean"]


@dataclass(frozen=True, eq=False)
class CoverTree:
    """Classes hung under near classes: `distance * scale <= base ** -level` to the parent.

    `center_parent` [K] is -1 for the root, `level` [K] the level at which a class first appears (0
    for the root). The net of level l, all classes with `level <= l`, keeps its members more than
    `base ** -(l + 1)` apart and has every class within that, distances multiplied by `scale`; below
    the deepest level hang only classes that rounding cannot tell from their parent.
    """

    center_parent: IntArray
    level: IntArray
    base: float
    scale: float
    root: int

    def utree(self) -> LabelTree:
        """Every node is a class, under its centre's parent (paper 000, section 4.1)."""
        return LabelTree.from_parents(self.center_parent, np.arange(len(self.center_parent)))

    def vtree(self) -> LabelTree:
        """Classes are leaves; inner nodes are pseudoclasses (paper 000, section 4.2).

        In the explicit tree the children of (c, l) are (c, l + 1) and the classes that first appear
        at level l + 1 with parent c. Each (c, l) with two or more of them is one pseudoclass, so
        there are fewer than 2K nodes.
        """
        num_classes = len(self.center_parent)
        newcomers = np.flatnonzero(self.center_parent >= 0)
        host_pairs = np.stack([self.center_parent[newcomers], self.level[newcomers] - 1], 1)
        # Sorted by centre, then level: the pair before is the centre's next shallower one.
        pairs, host = np.unique(host_pairs, axis=0, return_inverse=True)
        center = pairs[:, 0]
        # The pseudoclass under which a class first appears.
        above = np.full(num_classes, -1, np.int64)
        above[newcomers] = num_classes + host.reshape(-1)
        pseudoclasses = num_classes + np.arange(len(center))
        is_shallowest = np.diff(center, prepend=-1) != 0
        pseudo_parent = np.where(is_shallowest, above[center], pseudoclasses - 1)
        class_parent = above.copy()
        is_deepest = np.diff(center, append=-1) != 0
        class_parent[center[is_deepest]] = pseudoclasses[is_deepest]
        return LabelTree.from_parents(
            np.concatenate([class_parent, pseudo_parent]),
            np.concatenate([np.arange(num_classes), np.full(len(center), -1)]),
        )


def build_cover_tree(
    vectors: ArrayLike, *, base: float = 1.3, metric: Metric = "cosine"
) -> CoverTree:
    """Build the cover tree of label vectors [K, d] by farthest-first traversal (Gonzalez 1985).

    `metric` cosine compares rows scaled to unit length (zero rows stay zero), euclidean the rows
    as they are. The root is the row closest to the mean; the next class is always the one farthest
    from all before it; a class hangs under the nearest class of the net one level up. Ties go to
    the lowest class id, for parents to the class inserted first. Classes nearer to each other than
    the rounding of the vectors' own type count as equal. ValueError for a base outside 1.001..1000,
    an empty or non-finite matrix, or an unknown metric.
    """
    if not 1.001 <= base <= 1000:
        raise ValueError(f"base is {base}: a cover tree needs one from 1.001 to 1000, such as 1.3")
    points, unit, resolution = _points(vectors, metric)
    root = int(np.argmin(np.square(points - points.mean(0)).sum(1)))
    net = _Net(points, root)
    diameter = net.farthest()[1]
    # Level l takes the gaps in (limits[l], limits[l - 1]].
    limits = diameter * base ** -np.arange(_num_levels(base, diameter, resolution) + 1.0)
    parent = np.full(len(points), -1, np.int64)
    level = np.zeros(len(points), np.int64)
    current, nearest_in_net_above = 0, net.nearest
    while True:
        point, gap = net.farthest()
        if gap <= limits[-1]:
            break
        if gap <= limits[current]:
            current = int(np.searchsorted(-limits, -gap, side="right"))
            nearest_in_net_above = net.nearest.copy()
        parent[point], level[point] = nearest_in_net_above[point], current
        net.insert(point)
    twins = net.outside()
    parent[twins], level[twins] = net.nearest[twins], level.max() + 1
    scale = 1.0 / (base * diameter * unit) if diameter > 0 else 1.0
    return CoverTree(parent, level, base, scale, root)


class _Net:
    """The classes inserted so far, and each other class's nearest among them."""

    def __init__(self, points: FloatArray, root: int) -> None:
        self._points = points
        self._norms = np.square(points).sum(1)
        self._gaps = np.full(len(points), np.inf)  # squared; -inf for those in the net
        self.nearest = np.full(len(points), root, np.int64)
        self.insert(root)

    def insert(self, point: int) -> None:
        """Add one class. BLAS finds who may be nearer to it, and only those are measured exactly.

        The expansion |x|^2 + |c|^2 - 2 x.c alone would lose small distances to cancellation, and
        would give equal rows a distance.
        """
        points, center = self._points, self._points[point]
        norms = self._norms + self._norms[point]
        rounding = 8 * (points.shape[1] + 4) * np.finfo(np.float64).eps * norms
        self._gaps[point] = -np.inf
        maybe = np.flatnonzero(norms - 2 * (points @ center) - rounding < self._gaps)
        exact = np.square(points[maybe] - center).sum(1)
        nearer = exact < self._gaps[maybe]
        self._gaps[maybe[nearer]] = exact[nearer]
        self.nearest[maybe[nearer]] = point

    def farthest(self) -> tuple[int, float]:
        """The class farthest from the net and its distance; 0 where all are inside."""
        point = int(np.argmax(self._gaps))
        return point, math.sqrt(max(self._gaps[point], 0.0))

    def outside(self) -> IntArray:
        return np.flatnonzero(self._gaps >= 0)


def _num_levels(base: float, diameter: float, resolution: float) -> int:
    """The deepest level whose gaps are all larger than the resolution; 0 if there is none."""
    if diameter <= resolution:
        return 0
    return max(1, math.floor(math.log(diameter / resolution) / math.log(base)))


def _points(vectors: ArrayLike, metric: Metric) -> tuple[FloatArray, float, float]:
    """Rows to compare [K, d], the length of their unit, and the distance that rounding makes."""
    given = np.asarray(vectors)
    if given.ndim != 2 or 0 in given.shape or given.dtype.kind not in "fiu":
        raise ValueError(
            f"label vectors have shape {given.shape} and type {given.dtype}: "
            "give real numbers, [classes, dim]"
        )
    rows = given.astype(np.float64)
    broken = np.flatnonzero(~np.isfinite(rows).all(1))
    if broken.size:
        raise ValueError(
            f"the label vector of class {broken[0]} holds NaN or infinity: mend it or make it zeros"
        )
    unit = 1.0
    match metric:
        case "cosine":
            # Twice, because the squares of very large or small entries leave the range of float64.
            rows = _divide(rows, np.abs(rows).max(1, keepdims=True))
            rows = _divide(rows, np.linalg.norm(rows, axis=1, keepdims=True))
        case "euclidean":
            unit = float(np.abs(rows).max()) or 1.0
            rows = rows / unit
        case _:
            raise ValueError(f"metric is {metric!r}: use cosine or euclidean")
    eps = np.finfo(given.dtype if given.dtype.kind == "f" else np.float64).eps
    return rows, unit, 4 * float(eps) * float(np.linalg.norm(rows, axis=1).max())


def _divide(rows: FloatArray, by: FloatArray) -> FloatArray:
    return np.divide(rows, by, out=np.zeros_like(rows), where=by > 0)
