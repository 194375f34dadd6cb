"""Tiles: groups of nearby classes, compared with new members of a net by float32 matrix products.

The coordinates in a tile are relative to its mean, so the rounding error is small compared with the
tile. The triangle inequality excludes members that are far from a tile. Small tiles exclude more
members; large tiles have larger products, which are faster.
"""

import math

import numpy as np
from numpy.typing import NDArray

from heads.tree.label_tree import IntArray

FloatArray = NDArray[np.float64]

# Classes per tile. With 256 to 2,048, trees of clustered and of Gaussian vectors take the same time
# within 30%.
_CLASSES = 512


class Tile:
    """The classes `ids` [C] and their float32 coordinates relative to `center` [d].

    `radius` is the largest distance from the center to a class.
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
        estimates = left @ self._rows.T
        least = estimates.min(0)
        hit = np.flatnonzero(least - slack < gaps - self._norms)
        near = estimates[:, hit] <= least[hit] + np.float32(2 * slack)
        which, whose = np.nonzero(near)
        return which, self.ids[hit[whose]]


def reach(radius: float, gaps: FloatArray) -> float:
    """Return the distance from the center of a tile within which a new member may be the nearest
    member of a class, rounded up.

    `gaps` [C] are the squared distances of the classes of the tile to their nearest members, or
    -inf for members. The reach is 0 if no class is at a positive distance from its nearest member.
    """
    widest = float(gaps.max(initial=-np.inf))
    return (radius + math.sqrt(widest)) * (1 + 1e-6) if widest > 0 else 0.0


def cut_tiles(points: FloatArray, order: IntArray) -> list[Tile]:
    """Divide classes into tiles, consecutive parts of `order` [C], in which neighbors are close."""
    starts = range(0, len(order), _CLASSES)
    return [Tile(points, order[start : start + _CLASSES]) for start in starts]
