"""A class over a whole gallery: the score of every item, and pages of the best of them."""

import numpy as np
import torch

from heads.logits import ClassRows, LogitMap
from heads.scores import score
from trainer.bundle.spec import LossSpec

_FIRST_PAGE = 1024


def class_scores(
    features: np.ndarray, row: ClassRows, logits: LogitMap, loss: LossSpec
) -> np.ndarray:
    """Features [N, dim], which may be mapped and larger than memory, and the row of one class ->
    scores float32 [N]."""
    found = torch.from_numpy(logits.of_one_class(features, row))
    return score(loss.score, found, eps=loss.eps).numpy()


class Ranking:
    """Scores of all items, and the order of the best as far as pages asked for it."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores = scores
        self._best = best(scores, _FIRST_PAGE)

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes + self._best.nbytes

    def reaching(self, threshold: float) -> int:
        """How many items have a score of `threshold` or more."""
        return int(np.count_nonzero(self.scores >= np.float64(threshold)))

    def page(self, offset: int, limit: int) -> list[int]:
        """Items from the best on; equal scores stand in the order of the items."""
        wanted = min(offset + limit, len(self.scores))
        known = self._best  # another thread may put a longer one in its place
        if wanted > len(known):
            # Twice as many, so that a reader who goes on page by page sorts a few times only.
            self._best = known = best(self.scores, 2 * wanted)
        return known[offset:wanted].tolist()


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` items of the highest scores, int64, in order; ties go to the lowest index."""
    num = len(scores)
    if count >= num:
        return np.argsort(-scores, kind="stable")
    last = np.partition(scores, num - count)[num - count]
    above = np.flatnonzero(scores > last)
    ties = np.flatnonzero(scores == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-scores[above], kind="stable")], ties])
