"""Tiles: groups of nearby classes, compared with new members of a net by float32 matrix products.

The coordinates in a tile are relative to its mean, so the rounding error is small compared with the
tile. The triangle inequality excludes members that are far from a tile. Narrow tiles exclude more
members; wide tiles have larger products, which are faster. `cut_tiles` therefore keeps a narrow
tile only if it excludes most members. Vectors without cluster structure get wide tiles.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from heads.tree.label_tree import IntArray

FloatArray = NDArray[np.float64]

_COLUMNS = 1024  # classes per matrix product
_LEAST = (32, 256)  # classes per narrow tile: for many and for few dimensions
_LEAST_VALUES = 1 << 13  # coordinates per narrow tile
_MOST = 2048  # classes per tile
_MOST_VALUES = 1 << 21  # coordinates per tile
_SAMPLED = 256  # classes in the sample that estimates how many members a tile excludes
_NEAR = 0.25  # largest share of members that a narrow tile does not exclude


class Tile:
    """The classes `ids` [C] and their float32 coordinates relative to `center` [d].

    `radius` is the largest distance from the center to a class.
    """

    def __init__(self, points: FloatArray, ids: IntArray) -> None:
        self.ids = ids
        local, self.center, self._norms = _centered(points, ids)
        self.radius = math.sqrt(self._norms.max())
        self._rows = np.ones((len(ids), points.shape[1] + 1), np.float32)
        self._rows[:, :-1] = local

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Remove the classes for which the mask `kept` [C] is False."""
        self.ids, self._norms, self._rows = self.ids[kept], self._norms[kept], self._rows[kept]

    def closer(self, members: FloatArray, gaps: FloatArray) -> tuple[IntArray, IntArray]:
        """Return pairs (index of a member, class) whose squared distance may be less than the gap
        of the class.

        If any of the `members` [M, d] is closer to a class than the entry of the class in `gaps`
        [C], the pairs include all members that are nearest to the class. For each class, pairs are
        in the order of the members.
        """
        local = members - self.center
        squares = np.einsum("ij,ij->i", local, local)
        # The products with the rows are |x - y|^2 - |x|^2 for members y and classes x.
        left = np.empty((len(local), local.shape[1] + 1), np.float32)
        np.multiply(local, -2, out=left[:, :-1], casting="same_kind")
        left[:, -1] = squares
        eps = (local.shape[1] + 8) * float(np.finfo(np.float32).eps)
        slack = eps * (self.radius + math.sqrt(squares.max())) ** 2
        pairs = list(self._pairs_below(gaps - self._norms, left, slack))
        which, whose = (np.concatenate(part) for part in zip(*pairs, strict=True))
        return which, self.ids[whose]

    def _pairs_below(
        self, limits: FloatArray, left: NDArray[np.float32], slack: float
    ) -> Iterator[tuple[IntArray, IntArray]]:
        for start in range(0, len(self.ids), _COLUMNS):
            estimates = left @ self._rows[start : start + _COLUMNS].T
            least = estimates.min(0)
            hit = np.flatnonzero(least - slack < limits[start : start + _COLUMNS])
            near = estimates[:, hit] <= least[hit] + np.float32(2 * slack)
            which, whose = np.nonzero(near)
            yield which, start + hit[whose]


def reach(radius: float, gaps: FloatArray) -> float:
    """Return the distance from the center of a tile within which a new member may be the nearest
    member of a class, rounded up.

    `gaps` [C] are the squared distances of the classes of the tile to their nearest members, or
    -inf for members. The reach is 0 if no class is at a positive distance from its nearest member.
    """
    widest = float(gaps.max(initial=-np.inf))
    return (radius + math.sqrt(widest)) * (1 + 1e-6) if widest > 0 else 0.0


def cut_tiles(
    points: FloatArray, order: IntArray, nearest: IntArray, gaps: FloatArray
) -> list[Tile]:
    """Divide classes into tiles that are consecutive parts of `order` [C].

    `nearest` [C] and `gaps` [C] are the nearest members of these classes and the squared distances
    to them; classes with the same nearest member must be consecutive.
    """
    if not len(order):
        return []
    least, most = _sizes(points.shape[1])
    pieces = _pieces(nearest, max(1, least // 4), max(1, most // 4))
    edges = _narrow(points, order, pieces, gaps, least, most)
    sampled = points[order[np.linspace(0, len(order) - 1, _SAMPLED).astype(np.int64)]]
    edges = _joined(edges, _is_useful(points, order, edges, gaps, sampled), most)
    return [Tile(points, order[first:last]) for first, last in pairwise(edges)]


def _pieces(nearest: IntArray, least: int, most: int) -> list[int]:
    """Return the edges of pieces of about `least` to `most` classes.

    A piece ends where the nearest member changes, or after `most` classes.
    """
    edges = [0]
    for end in [*(np.flatnonzero(np.diff(nearest)) + 1).tolist(), len(nearest)]:
        while end - edges[-1] > most:
            edges.append(edges[-1] + most)
        if end - edges[-1] >= least or end == len(nearest):
            edges.append(end)
    return edges


def _narrow(
    points: FloatArray,
    order: IntArray,
    pieces: list[int],
    gaps: FloatArray,
    least: int,
    most: int,
) -> list[int]:
    """Return the edges of narrow tiles, which consist of consecutive pieces.

    A tile is extended up to `least` classes, and from there up to `most` classes while its mean
    squared radius is at most its mean squared gap.
    """
    edges, total = [0], np.zeros(points.shape[1])
    margin = 0.0  # sum of the squared gaps, less the sum of the squared coordinates
    for first, last in pairwise(pieces):
        rows = points[order[first:last]]
        own_total = rows.sum(0)
        own_margin = float(gaps[first:last].sum()) - float(np.vdot(rows, rows))
        size, joined = last - edges[-1], total + own_total
        # The sum of the squared radii is that of the squared coordinates, less |total|^2 / size.
        is_narrow = float(joined @ joined) / size + margin + own_margin >= 0
        if first > edges[-1] and size > least and (size > most or not is_narrow):
            edges.append(first)
            total, margin = own_total, own_margin
        else:
            total, margin = joined, margin + own_margin
    return [*edges, len(order)]


def _is_useful(
    points: FloatArray, order: IntArray, edges: list[int], gaps: FloatArray, sampled: FloatArray
) -> list[bool]:
    """Return for each tile whether it excludes most of the sampled classes."""
    useful = []
    for first, last in pairwise(edges):
        _, center, norms = _centered(points, order[first:last])
        within = reach(math.sqrt(norms.max()), gaps[first:last]) ** 2
        near = np.square(sampled - center).sum(1) < within
        useful.append(bool(near.mean() <= _NEAR))
    return useful


def _joined(edges: list[int], useful: list[bool], most: int) -> list[int]:
    """Return the edges that remain after joining consecutive tiles that are not useful."""
    kept = [0]
    for (edge, end), (before, after) in zip(pairwise(edges[1:]), pairwise(useful), strict=True):
        if before or after or end - kept[-1] > most:
            kept.append(edge)
    return [*kept, edges[-1]]


def _sizes(dim: int) -> tuple[int, int]:
    """Return the smallest number of classes for which a narrow tile saves time, and the largest
    number of classes per tile."""
    least, at_most = _LEAST
    return (
        min(at_most, max(least, _LEAST_VALUES // dim)),
        max(least, min(_MOST, _MOST_VALUES // dim)),
    )


def _centered(points: FloatArray, ids: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the coordinates of classes relative to their mean, the mean, and their squared
    distances from it."""
    local = points[ids]
    center = local.mean(0)
    local -= center
    return local, center, np.einsum("ij,ij->i", local, local)
