"""Rank items by their scores, and cache the scores of recent searches, so that reading the next
page does not require another matrix product."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from threading import Lock

import numpy as np
import torch

from heads.logits import ClassRows, LogitMap
from heads.losses import score
from trainer.bundle.spec import LossSpec

_FIRST_PAGE = 1024


def class_scores(
    features: np.ndarray,
    row: ClassRows,
    logits: LogitMap,
    loss: LossSpec,
    inverse_norms: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the scores of N items for one class, float32 [N]. The features [N, dim] may be
    memory-mapped and larger than memory. For cosines, `inverse_norms` [N] saves a pass over
    them."""
    values = torch.from_numpy(logits.of_one_class(features, row, inverse_norms))
    return score(loss.score, values, eps=loss.eps).numpy()


class Ranking:
    """Items ordered by score, sorted only as far as pages have been requested.

    `scores` are those of `positions`, or of the items 0, 1, 2, … if `positions` is None. Only the
    first `total` items are part of the ranking.
    """

    def __init__(
        self, scores: np.ndarray, positions: np.ndarray | None = None, total: int | None = None
    ) -> None:
        self.scores, self._positions = scores, positions
        self.total = len(scores) if total is None else total
        self._best = best(scores, min(_FIRST_PAGE, self.total))

    @property
    def nbytes(self) -> int:
        positions = 0 if self._positions is None else self._positions.nbytes
        return self.scores.nbytes + self._best.nbytes + positions

    def count_reaching(self, threshold: float) -> int:
        """Return the number of items with a score of at least `threshold`."""
        reaching = int(np.count_nonzero(self.scores >= np.float64(threshold)))
        return min(self.total, reaching)

    def page(self, offset: int, limit: int) -> list[tuple[int, float]]:
        """Return the positions and scores of items in descending order of score, with ties in the
        order of the items."""
        end = min(offset + limit, self.total)
        order = self._best  # another thread may replace it with a longer one
        if end > len(order):
            # Sort twice as many items as needed, so that reading all pages takes only O(log n)
            # sorts.
            self._best = order = best(self.scores, min(2 * end, self.total))
        found = order[offset:end]
        positions = found if self._positions is None else self._positions[found]
        return list(zip(positions.tolist(), self.scores[found].tolist(), strict=True))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` highest scores, int64, in descending order of score, with
    ties in ascending order of index.

    Partitions in O(n), then sorts only the items above the `count`-th score.
    """
    num = len(scores)
    if not count:
        return np.empty(0, np.int64)
    if count >= num:
        return np.argsort(-scores, kind="stable")
    last = np.partition(scores, num - count)[num - count]
    above = np.flatnonzero(scores > last)
    ties = np.flatnonzero(scores == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])


class Rankings:
    """An LRU cache of rankings with a size limit in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, Lock()
        self._rankings: OrderedDict[Hashable, Ranking] = OrderedDict()

    def get(self, key: Hashable) -> Ranking | None:
        with self._lock:
            if key in self._rankings:
                self._rankings.move_to_end(key)
            return self._rankings.get(key)

    def put(self, key: Hashable, ranking: Ranking) -> None:
        with self._lock:
            self._rankings[key] = ranking
            while sum(one.nbytes for one in self._rankings.values()) > self._max_bytes:
                self._rankings.popitem(last=False)

    def __iter__(self) -> Iterator[Hashable]:
        """Iterate over the keys, the least recently used first."""
        return iter(self._rankings)
