"""Tiles: groups of nearby classes, compared with new members of a net by float32 matrix products.

The coordinates in a tile are relative to its mean, so the rounding error is small compared with the
tile. Wide tiles need fewer products; narrow tiles are excluded more often by the triangle
inequality. `cut_tiles` therefore joins neighboring pieces as long as the result is hardly wider
than the pieces.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from heads.tree.label_tree import IntArray

FloatArray = NDArray[np.float64]

_COLUMNS = 1024  # classes per matrix product
_WIDEST = 4096  # classes per tile
_SPREAD = 1.2  # a tile's root-mean-square radius, relative to that of its first piece


class Tile:
    """The classes `ids` [C] and their coordinates relative to their mean.

    `radius` is the largest distance of a class from `center` [d] when the tile was made.
    """

    def __init__(self, points: FloatArray, ids: IntArray) -> None:
        self.ids = ids
        local = points[ids]
        self.center = local.mean(0)
        local -= self.center
        self._norms = np.einsum("ij,ij->i", local, local)
        self.radius = math.sqrt(self._norms.max())
        self._rows = np.ones((len(ids), points.shape[1] + 1), np.float32)
        self._rows[:, :-1] = local

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Remove the classes that are not in the mask `kept` [C]."""
        self.ids, self._norms, self._rows = self.ids[kept], self._norms[kept], self._rows[kept]

    def closer(self, members: FloatArray, gaps: FloatArray) -> tuple[IntArray, IntArray]:
        """Return pairs (index of a member, class) that may have a squared distance below the
        class's entry in `gaps` [C].

        For every class with such a member, the pairs contain all of its nearest members [M, d].
        Pairs are sorted by member within each class.
        """
        local = members - self.center
        squares = np.einsum("ij,ij->i", local, local)
        # The products are |x - y|^2 - |x|^2 for members y and classes x.
        left = np.empty((len(local), local.shape[1] + 1), np.float32)
        np.multiply(local, -2, out=left[:, :-1], casting="same_kind")
        left[:, -1] = squares
        eps = (local.shape[1] + 8) * float(np.finfo(np.float32).eps)
        slack = eps * (self.radius + math.sqrt(squares.max())) ** 2
        found = list(self._below(left, gaps - self._norms, slack))
        which, whose = (np.concatenate(part) for part in zip(*found, strict=True))
        return which, self.ids[whose]

    def _below(
        self, left: NDArray[np.float32], limits: FloatArray, slack: float
    ) -> Iterator[tuple[IntArray, IntArray]]:
        for start in range(0, len(self.ids), _COLUMNS):
            estimates = left @ self._rows[start : start + _COLUMNS].T
            least = estimates.min(0)
            hit = np.flatnonzero(least - slack < limits[start : start + _COLUMNS])
            near = estimates[:, hit] <= least[hit] + np.float32(2 * slack)
            which, whose = np.nonzero(near)
            yield which, start + hit[whose]


def cut_tiles(points: FloatArray, order: IntArray, edges: Sequence[int]) -> list[Tile]:
    """Make tiles of consecutive pieces `order[edges[i]:edges[i + 1]]`."""
    return [Tile(points, order[first:last]) for first, last in _joined(points, order, edges)]


def _joined(
    points: FloatArray, order: IntArray, edges: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the tiles. A range is extended by the next piece unless that increases
    its root-mean-square radius too much."""
    start, center, inertia, limit = 0, np.zeros(points.shape[1]), 0.0, math.inf
    for first, last in zip(edges, edges[1:], strict=False):
        local = points[order[first:last]]
        middle = local.mean(0)
        local -= middle
        own = float(np.einsum("ij,ij->", local, local))
        old, new = first - start, last - first
        # The parallel axis theorem gives the sum of squares about the common mean.
        moved = old * new / (old + new) * float(np.square(middle - center).sum())
        joined = inertia + own + moved
        if old and (last - start > _WIDEST or joined > limit * (old + new)):
            yield start, first
            start, old = first, 0
        if not old:
            limit = _SPREAD**2 * own / new
            center, inertia = middle, own
        else:
            center, inertia = (old * center + new * middle) / (old + new), joined
    if edges[-1] > start:
        yield start, edges[-1]
