"""A growing net of label vectors: its members, and the exact nearest member of every other class.

New members are added in batches. The triangle inequality excludes entire tiles of classes; in the
other tiles, float32 matrix products find the few classes that may be closer to a new member. Only
the distances of these classes are computed in float64, and all decisions are based on them. Tiles
and threads therefore affect the time, but not the net.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np

from heads.tree.label_tree import IntArray, preorder
from heads.tree.tiles import FloatArray, Tile, cut_tiles, reach

_SECTION = 256  # classes per section; candidates are taken from regions of several sections
_BLOCK = 512  # candidates compared with each other at a time
_REGION_MEMBERS = 64  # members of the net in the region of a block of candidates
_GROWTH = 3  # factor by which the net grows before sections and tiles are recomputed
_REMAINING = 7 / 8  # share of unfinished classes below which a tile drops the finished ones
_PAIR_VALUES = 1 << 20  # differences stored at a time


class Net:
    """A net over points [K, d] with entries of at most about 1; `root` is its first member.

    `gaps` [K] are squared distances to the nearest member, -inf for members. `nearest` [K] is the
    index of that member; ties go to the member that was added first. For each member, `parent` [K]
    is the member that was nearest to it before the `refine` call that added it; it is -1 for the
    root. `threads` runs the updates of tiles. `report` is called with the numbers of members and of
    all classes.
    """

    def __init__(
        self,
        points: FloatArray,
        root: int,
        threads: Executor,
        report: Callable[[int, int], None],
    ) -> None:
        self._points, self._threads, self._report = points, threads, report
        num_points = len(points)
        self.nearest = np.full(num_points, root, np.int64)
        self.parent = np.full(num_points, -1, np.int64)
        self.gaps = self._squared_distances(np.arange(num_points), self.nearest)
        self.gaps[root] = -np.inf
        self._size = 1
        self._cut()

    def widest_gap(self) -> float:
        """Return the largest distance from a class to the net; 0 if all are members."""
        return math.sqrt(max(float(self.gaps.max()), 0.0))

    def outside(self) -> IntArray:
        """Return the classes that are not members."""
        return np.flatnonzero(self.gaps >= 0)

    def refine(self, separation: float) -> IntArray:
        """Add classes until every class is within `separation` of the net; return the new members.

        A class is added only if it is farther than `separation` from all members, so the members
        remain at least that far apart. The farthest of a block of candidates is added first. Ties
        go to the lowest class ID.
        """
        if self._size >= _GROWTH * self._size_when_cut or 2 * len(self.outside()) < len(
            self._order
        ):
            self._cut()
        nearest_before, limit = self.nearest.copy(), separation * separation
        new = []
        for region in self._regions():
            while len(candidates := region[self.gaps[region] > limit]):
                if len(candidates) > _BLOCK:  # evenly spaced ones
                    spaced = np.linspace(0, len(candidates) - 1, _BLOCK).astype(np.int64)
                    candidates = candidates[spaced]
                chosen = self._separated(np.sort(candidates), limit)
                self._insert(chosen)
                new.append(chosen)
        joined = np.concatenate([np.empty(0, np.int64), *new])
        self.parent[joined] = nearest_before[joined]
        return joined

    def _regions(self) -> Iterator[IntArray]:
        """Yield the classes of consecutive sections with about `_REGION_MEMBERS` members each."""
        num_sections = len(self._edges) - 1
        at_once = max(1, math.ceil(num_sections * _REGION_MEMBERS / self._size))
        for first in range(0, num_sections, at_once):
            last = min(first + at_once, num_sections)
            yield self._order[self._edges[first] : self._edges[last]]

    def _separated(self, block: IntArray, limit: float) -> IntArray:
        """Choose members from a block by farthest-first traversal, until no gap exceeds the
        limit."""
        squares = self._block_distances(block, limit)
        gaps = self.gaps[block]
        chosen = []
        while gaps[farthest := int(gaps.argmax())] > limit:
            chosen.append(farthest)
            np.minimum(gaps, squares[farthest], out=gaps)
            gaps[farthest] = -np.inf
        return block[chosen]

    def _block_distances(self, block: IntArray, limit: float) -> FloatArray:
        """Return squared distances [C, C] within a block.

        Distances near or above the limit are recomputed from differences if |x|^2 + |y|^2 - 2xy
        loses precision to cancellation.
        """
        rows = self._points[block]
        rows -= rows.mean(0)
        norms = np.square(rows).sum(1)
        squares = norms[:, None] + norms - 2 * (rows @ rows.T)
        largest = 4 * float(norms.max())
        rounding = (rows.shape[1] + 8) * float(np.finfo(np.float64).eps) * largest
        one, other = np.nonzero((squares > limit - rounding) & (squares < 1e-5 * largest))
        squares[one, other] = self._squared_distances(block[one], block[other])
        return squares

    def _insert(self, chosen: IntArray) -> None:
        self.gaps[chosen] = -np.inf
        self._size += len(chosen)
        members = self._points[chosen]
        updates = [
            self._threads.submit(self._update_tile, tile, near, chosen, members)
            for tile, near in self._near(members)
        ]
        for update in updates:
            update.result()
        self._report(self._size, len(self._points))

    def _near(self, members: FloatArray) -> Iterator[tuple[int, IntArray]]:
        """Yield the tiles in which the nearest member of a class may change, and the indices of the
        new members [M, d] that are near enough to the tile to change it."""
        middle = members.mean(0)
        local = members - middle
        squares = np.square(local).sum(1)
        away = np.sqrt(np.square(self._centers - middle).sum(1)) - math.sqrt(squares.max())
        tiles = np.flatnonzero(away < self._reach)
        centers = self._centers[tiles] - middle
        sums = np.square(centers).sum(1)[:, None] + squares
        rounding = 4 * (local.shape[1] + 8) * float(np.finfo(np.float64).eps)
        between = sums * (1 - rounding) - 2 * (centers @ local.T)
        is_near = between < np.square(self._reach[tiles])[:, None]
        for i in np.flatnonzero(is_near.any(1)):
            yield int(tiles[i]), np.flatnonzero(is_near[i])

    def _update_tile(
        self, number: int, near: IntArray, chosen: IntArray, members: FloatArray
    ) -> None:
        """Update the nearest members of the classes in a tile after adding `chosen`, of which those
        at the indices `near` may be nearest."""
        tile = self._tiles[number]
        remaining = self.gaps[tile.ids] > 0
        if np.count_nonzero(remaining) < _REMAINING * len(remaining):
            tile.keep(remaining)
        if tile.ids.size:
            which, classes = tile.closer(members[near], self.gaps[tile.ids])
            if classes.size:
                self._keep_nearest(classes, chosen[near[which]])
        self._reach[number] = reach(tile.radius, self.gaps[tile.ids])

    def _keep_nearest(self, classes: IntArray, members: IntArray) -> None:
        """Update the nearest member of each class from (class, member) pairs, in the order in which
        the members were added."""
        exact = self._squared_distances(classes, members)
        order = np.lexsort((np.arange(len(exact)), exact, classes))
        first = order[np.diff(classes[order], prepend=-1) != 0]
        first = first[exact[first] < self.gaps[classes[first]]]
        self.gaps[classes[first]] = exact[first]
        self.nearest[classes[first]] = members[first]

    def _squared_distances(self, one: IntArray, other: IntArray) -> FloatArray:
        """Return squared distances of pairs of classes, computed from differences.

        They are exactly 0 for equal rows and accurate for close rows.
        """
        squares = np.empty(len(one))
        at_once = max(1, _PAIR_VALUES // self._points.shape[1])
        for start in range(0, len(one), at_once):
            part = slice(start, start + at_once)
            difference = self._points[one[part]]
            difference -= self._points[other[part]]
            squares[part] = np.einsum("ij,ij->i", difference, difference)
        return squares

    def _cut(self) -> None:
        """Sort the remaining classes by the tree order of their nearest members, and split them
        into sections and into tiles.

        Classes at distance 0 from a member are finished, so they are left out. The net depends on
        the sections, but not on the tiles.
        """
        remaining = np.flatnonzero(self.gaps > 0)
        rank = self._preorder_of_members()
        self._order = remaining[np.argsort(rank[self.nearest[remaining]], kind="stable")]
        # The squared distance between the nearest members of each class and the previous one.
        nearest = self.nearest[self._order]
        jumps = np.zeros(len(nearest))
        changes = np.flatnonzero(np.diff(nearest)) + 1
        jumps[changes] = self._squared_distances(nearest[changes - 1], nearest[changes])
        self._edges = _edges(jumps)
        self._tiles: list[Tile] = []  # release the memory of the previous tiles
        self._tiles = cut_tiles(self._points, self._order)
        centers = [tile.center for tile in self._tiles]
        self._centers = np.reshape(centers, (len(centers), self._points.shape[1]))
        self._reach = np.array([reach(tile.radius, self.gaps[tile.ids]) for tile in self._tiles])
        self._size_when_cut = self._size

    def _preorder_of_members(self) -> IntArray:
        """Return the position [K] of each member in a depth-first traversal of the current tree."""
        members = np.flatnonzero(self.gaps == -np.inf)
        above = self.parent[members]
        local = np.where(above < 0, -1, np.searchsorted(members, above))
        walk = preorder(local)
        rank = np.empty(len(self.gaps), np.int64)
        rank[members[walk]] = np.arange(len(walk))
        return rank


def _edges(jumps: FloatArray) -> list[int]:
    """Split a sequence into sections. A section ends at the widest jump between half of the maximum
    section size and the maximum."""
    edges = [0]
    while (start := edges[-1]) < len(jumps):
        if len(jumps) - start <= _SECTION:
            edges.append(len(jumps))
            continue
        earliest = start + _SECTION // 2
        window = jumps[earliest : start + _SECTION + 1]
        widest = int(window.argmax())
        edges.append(earliest + widest if window[widest] > 0 else start + _SECTION)
    return edges
