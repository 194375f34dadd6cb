"""The thresholds of classes, and what each of them promises.

A threshold for recall r is one of three kinds, with confidence c:

- `guaranteed`: at least the fraction r of new samples of the class pass, with confidence c. It is
  an order statistic of the class's own scores (`bounds.py`), so it needs `least_positives` samples.
- `shrunk`: an estimate from the class's samples and similar classes (`centers.py`, `heldout.py`).
  On average over such classes, the fraction r of new samples pass. The interval contains the pass
  rate of about the fraction c of such classes.
- `pooled`: one threshold for all classes, which the fraction r of the samples of all classes
  reach. It is used for a class without samples and without similar classes, and for every class
  without a guarantee if there are too few classes to estimate the spread between them. The interval
  combines the spread between classes with the class's own samples.

New samples must come from the distribution of the labeled set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainer.promises.bounds import (
    FloatArray,
    IntArray,
    beta_pass_rates,
    exact_pass_rates,
    guaranteed_pass_rates,
    guaranteed_rank,
)
from trainer.promises.centers import ClassCenters, class_centers
from trainer.promises.heldout import (
    ClassSamples,
    range_of,
    raw_pairs,
    residuals_of_ranges,
)

Kind = Literal["pooled", "shrunk", "guaranteed"]
KINDS: tuple[Kind, ...] = ("pooled", "shrunk", "guaranteed")  # stored as indices
POOLED, SHRUNK, GUARANTEED = range(3)

# A threshold can equal the score of a sample. In another batch, or with another engine or device,
# the score may be rounded down, so thresholds are lowered by this fraction of the largest one.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Promises:
    """Thresholds of K classes at R `recalls`.

    `row_of_class` int32 [K] is the row of each class in the arrays with M rows. The rows of the
    classes with samples come first, in the order of their IDs. The classes without samples have
    only one row per group, because their thresholds depend only on their group. `positives` int32
    [M] counts the samples of a class, and `thresholds` float32 [M, R] are compared with scores: a
    sample passes if its score is at or above the threshold. `kinds` uint8 [M, R] are indices into
    `KINDS`. `pass_rates` float32 [M, R, 3] contain the estimated fraction of new samples of the
    class that pass, and the lower and upper end of its interval; the estimate is NaN if it is
    unknown. `pooled` float32 [R] are the pooled thresholds, and `below_pooled` [R] is the fraction
    of the classes with samples in which fewer than the recall reach them.
    """

    recalls: tuple[float, ...]
    confidence: float
    row_of_class: NDArray[np.int32]
    positives: NDArray[np.int32]
    thresholds: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    pass_rates: NDArray[np.float32]
    pooled: NDArray[np.float32]
    below_pooled: FloatArray

    def by_class(self) -> "Promises":
        """Return the same thresholds with one row for each class, in the order of class IDs."""
        arrays = ("positives", "thresholds", "kinds", "pass_rates")
        rows = {name: getattr(self, name)[self.row_of_class] for name in arrays}
        return replace(self, **rows, row_of_class=np.arange(len(self.row_of_class), dtype=np.int32))


def make_promises(
    scores: NDArray[np.floating],
    labels: NDArray[np.integer],
    groups: NDArray[np.integer],
    recalls: Sequence[float],
    confidence: float,
) -> Promises:
    """Return the thresholds of K classes from a labeled set.

    `scores` [N] is the score of each sample for its own class, `labels` [N], and `groups` [K]
    assigns each class to a group of similar classes (`class_groups.py`); groups are numbered from
    0. `recalls` are in (0, 1], and `confidence` in (0, 1). The result does not depend on the order
    of the samples. Besides the result, memory holds a few numbers per sample and group. Raises
    ValueError for an empty set or a score that is not finite.
    """
    if not len(scores) or not np.isfinite(scores).all():
        raise ValueError(
            "there are no samples, or a score is not finite: pass a split with samples, and check "
            "the model's weights and inputs for non-finite values"
        )
    order = np.lexsort((scores, labels))
    ascending = scores[order].astype(np.float64)
    measured, of_row = np.unique(labels[order], return_inverse=True)
    # A class without samples for each group.
    num_groups = int(groups.max()) + 1
    of_rows = np.concatenate([groups[measured], np.arange(num_groups)]).astype(np.int64)
    row_of_class = np.add(groups, len(measured), dtype=np.int32)
    row_of_class[measured] = np.arange(len(measured))
    positives = np.bincount(of_row, minlength=len(of_rows))
    samples = ClassSamples(ascending, np.cumsum(positives) - positives, positives)
    centers = class_centers(ascending, of_row, of_rows)
    found = _Thresholds(samples, centers, confidence)
    columns = [found.at(recall) for recall in recalls]
    thresholds, kinds, pass_rates, pooled, below = zip(*columns, strict=True)
    return Promises(
        tuple(float(recall) for recall in recalls),
        confidence,
        row_of_class,
        positives.astype(np.int32),
        np.stack(thresholds, 1),
        np.stack(kinds, 1),
        np.stack(pass_rates, 1),
        np.array(pooled, np.float32),
        np.array(below),
    )


# The IDs [n] of classes, and their thresholds [n] and pass rates [n, 3].
_Found = tuple[IntArray, NDArray[np.float32], FloatArray]


class _Thresholds:
    """Computes the thresholds of all classes at one recall after another."""

    def __init__(self, samples: ClassSamples, centers: ClassCenters, confidence: float) -> None:
        self._samples, self._centers, self._confidence = samples, centers, confidence
        self._margin = _ROUNDING * float(abs(samples.scores).max())
        self._ascending = np.sort(samples.scores)
        rng = np.random.default_rng(0)
        self._pairs = raw_pairs(samples, rng)
        ranges = int(range_of(samples.positives).max()) + 1
        self._ranges = residuals_of_ranges(samples, centers, ranges, rng)

    def at(
        self, recall: float
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.float32], np.float32, float]:
        """Return thresholds [K], kinds [K], pass rates [K, 3], the pooled threshold, and the
        fraction of classes below the recall at the pooled threshold.
        """
        positives = self._samples.positives
        last = len(self._ascending) - _needed(len(self._ascending), recall)
        pooled = self._lowered(self._ascending[[last]])[0]
        passed = self._of_classes(self._samples.scores >= pooled)
        below = (passed < _needed(positives, recall)).sum() / (positives > 0).sum()
        thresholds = np.full(len(positives), pooled)
        kinds = np.full(len(positives), POOLED, np.uint8)
        pass_rates = np.empty((len(positives), 3), np.float32)
        for kind, found in ((SHRUNK, self._shrunk(recall)), (GUARANTEED, self._guaranteed(recall))):
            classes, of_classes, rates = found
            thresholds[classes], kinds[classes], pass_rates[classes] = of_classes, kind, rates
        left = np.flatnonzero(kinds == POOLED)
        pass_rates[left] = self._at_pooled(passed[left], positives[left], float(pooled))
        return thresholds, kinds, pass_rates, pooled, float(below)

    def _lowered(self, thresholds: FloatArray) -> NDArray[np.float32]:
        """Return the thresholds minus the margin, rounded down to float32."""
        wanted = thresholds - self._margin
        rounded = wanted.astype(np.float32)
        below = np.nextafter(rounded, np.float32(-np.inf))
        return np.where(rounded > wanted, below, rounded).astype(np.float32)

    def _of_classes(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the samples of each class [K] of `values` [N]."""
        totals = np.append(0, np.cumsum(values))
        starts = self._samples.starts
        return totals[starts + self._samples.positives] - totals[starts]

    def _at_pooled(self, passed: IntArray, positives: IntArray, pooled: float) -> FloatArray:
        counts, inverse = np.unique(
            np.stack([passed, positives]), axis=1, return_inverse=True
        )  # few distinct pairs, because these classes have few samples
        passed, positives = counts
        if self._pairs is None:
            return exact_pass_rates(passed, positives, self._confidence)[inverse]
        alpha, beta = self._pairs.beta_at(pooled)
        rates = beta_pass_rates(alpha + passed, beta + positives - passed, self._confidence)
        return rates[inverse]

    def _shrunk(self, recall: float) -> _Found:
        centers, positives = self._centers, self._samples.positives
        has_similar = (centers.num_similar > 0) & (centers.of_groups > 0)
        classes = np.flatnonzero((positives > 0) | has_similar)
        if not self._ranges:
            classes = classes[:0]
        num = positives[classes]
        means = self._of_classes(self._samples.scores)[classes] / np.maximum(num, 1)
        offsets = np.array([each.offset(recall) for each in self._ranges])
        rates = [
            beta_pass_rates(*residuals.beta_at(offset), self._confidence)
            for residuals, offset in zip(self._ranges, offsets, strict=True)
        ]
        at = range_of(num)
        thresholds = centers.at(classes, means, num) + offsets[at]
        return classes, self._lowered(thresholds), np.reshape(rates, (-1, 3))[at]

    def _guaranteed(self, recall: float) -> _Found:
        distinct, inverse = np.unique(self._samples.positives, return_inverse=True)
        rank = guaranteed_rank(distinct, recall, self._confidence)[inverse]
        classes = np.flatnonzero(rank > 0)
        rank, positives = rank[classes], self._samples.positives[classes]
        scores = self._samples.scores[self._samples.starts[classes] + rank - 1]
        rates = guaranteed_pass_rates(positives, rank, self._confidence)
        return classes, self._lowered(scores), rates


def _needed(num: IntArray | int, recall: float) -> IntArray:
    """Return ceil(recall * num), corrected for rounding: 0.55 * 100 is 55.00000000000001."""
    return np.ceil(np.asarray(num) * recall * (1 - 1e-12)).astype(np.int64)
