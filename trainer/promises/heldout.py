"""Pass rates of thresholds that are estimated from similar classes, measured on held-out samples.

The threshold of a class is the center of its scores (`centers.py`) plus an offset. To choose the
offset and to estimate the pass rate, two samples of a class are held out, and its center is
computed from m of the others. The held-out scores minus the center are *residuals*. The offset for
recall r is the (1 - r)-quantile of the residuals of many classes, so a held-out sample passes with
probability r on average over the classes. The pairs show how much the pass rate p differs between
classes: both samples of a pair pass with probability E[p^2]. The beta distribution with these two
moments describes p, and its central interval is the interval of the pass rate of a class.

The number m matters, so pairs are collected for each range 0, 1, 2-3, 4-7, 8-15, ... of m. A class
with n samples uses the residuals of the range that contains n.
"""

from dataclasses import dataclass

import numpy as np

from trainer.promises.bounds import FloatArray, IntArray
from trainer.promises.centers import ClassCenters

LEAST_CLASSES = 30  # the spread of the pass rates of fewer classes is not known well enough
_MOST_CLASSES = 4096
_MOST_SAMPLES = 512  # of a class
_LEAST_PAIRS = 16_384
_LEAST_ROUNDS = 4


@dataclass(frozen=True)
class ClassSamples:
    """Scores [N] of samples for their own classes, ascending within each class; class j has the
    scores from `starts[j]` to `starts[j] + positives[j]`.
    """

    scores: FloatArray
    starts: IntArray
    positives: IntArray


@dataclass(frozen=True)
class Residuals:
    """Residuals of pairs of held-out samples [D, P, 2]: P pairs from each of D classes."""

    pairs: FloatArray

    def offset(self, recall: float) -> float:
        """Return the largest offset that the fraction `recall` of the residuals reaches."""
        return float(np.quantile(self.pairs, 1 - recall, method="lower"))

    def beta_at(self, offset: float) -> tuple[float, float]:
        """Return the parameters of the beta distribution of pass rates at an offset."""
        passes = self.pairs >= offset
        # A mean of 0 or 1 in a finite sample does not make the pass rate certain.
        unseen = 0.5 / len(passes)
        mean = float(np.clip(passes.mean(), unseen, 1 - unseen))
        # A standard error is added, so that the interval is rather too wide than too narrow. At a
        # high recall, few pairs fail together, and the normal distribution gives a better estimate.
        of_classes = (passes - mean).prod(2).mean(1) / (mean * (1 - mean))
        error = of_classes.std(ddof=1) / np.sqrt(len(of_classes))
        correlation = max(of_classes.mean() + error, self._normal_correlation(mean))
        total = 1 / float(np.clip(correlation, 1e-4, 0.999)) - 1
        return mean * total, (1 - mean) * total

    def _normal_correlation(self, mean: float) -> float:
        """Return the correlation between the passes of a pair whose residuals are normal, with
        their measured correlation.
        """
        from scipy.special import ndtri, owens_t

        centered = self.pairs - self.pairs.mean()
        variance = float((centered**2).mean())
        joint = float(centered.prod(2).mean()) / variance if variance > 0 else 0.0
        joint = float(np.clip(joint, 0.0, 1.0))
        # P(both pass) = mean - 2 T(h, a) (Owen, Annals of Mathematical Statistics 27, 1956).
        slope = np.sqrt((1 - joint) / (1 + joint))
        return float(1 - 2 * owens_t(ndtri(mean), slope) / (mean * (1 - mean)))


def range_of(num_samples: IntArray) -> IntArray:
    """Return the index of the range that contains a number of samples."""
    return np.frexp(num_samples.astype(np.float64))[1].astype(np.int64)


def raw_pairs(samples: ClassSamples, rng: np.random.Generator) -> Residuals | None:
    """Return pairs of scores of the same class, without subtracting a center. None if there are too
    few classes with two samples.
    """
    zero = np.zeros(len(samples.positives))
    return _residuals(samples, ClassCenters(zero, zero.astype(np.int64), 0, 0, 0), 0, rng)


def residuals_of_ranges(
    samples: ClassSamples, centers: ClassCenters, num_ranges: int, rng: np.random.Generator
) -> list[Residuals]:
    """Return the residuals of the first `num_ranges` ranges. A range with too few classes uses the
    residuals of the previous range, whose centers are less accurate. The list is empty if there are
    too few classes for range 0.
    """
    found: list[Residuals] = []
    for index in range(num_ranges):
        residuals = _residuals(samples, centers, index, rng) or (found[-1] if found else None)
        if residuals is None:
            return []
        found.append(residuals)
    return found


def _residuals(
    samples: ClassSamples, centers: ClassCenters, index: int, rng: np.random.Generator
) -> Residuals | None:
    least, most = (1 << index) >> 1, (1 << index) - 1
    classes = np.flatnonzero(samples.positives >= least + 2)
    if len(classes) < LEAST_CLASSES:
        return None
    if len(classes) > _MOST_CLASSES:
        classes = np.sort(rng.choice(classes, _MOST_CLASSES, replace=False))
    table, num = _table(samples, classes)
    rounds = max(_LEAST_ROUNDS, -(-_LEAST_PAIRS // len(classes)))
    pairs = [_round(table, num, classes, centers, (least, most), rng) for _ in range(rounds)]
    return Residuals(np.stack(pairs, 1))


def _table(samples: ClassSamples, classes: IntArray) -> tuple[FloatArray, IntArray]:
    """Return the scores of `classes`, one row each, and their number. A class with many samples
    contributes evenly spaced ones.
    """
    positives = samples.positives[classes]
    num = np.minimum(positives, _MOST_SAMPLES)
    columns = np.arange(num.max())
    at = np.minimum(columns, num[:, None] - 1) * positives[:, None] // num[:, None]
    return samples.scores[samples.starts[classes][:, None] + at], num


def _round(
    table: FloatArray,
    num: IntArray,
    classes: IntArray,
    centers: ClassCenters,
    limits: tuple[int, int],
    rng: np.random.Generator,
) -> FloatArray:
    """Return the residuals of one random pair per class [D, 2], each with a random m within
    `limits`.
    """
    least, most = limits
    own = rng.integers(least, np.minimum(num - 2, most), endpoint=True)
    keys = rng.random(table.shape)
    columns = np.arange(table.shape[1])
    keys[columns >= num[:, None]] = np.inf  # padding
    shuffled = np.take_along_axis(table, keys.argsort(1)[:, : most + 2], 1)
    used = np.arange(shuffled.shape[1] - 2) < own[:, None]
    means = np.where(used, shuffled[:, 2:], 0).sum(1) / np.maximum(own, 1)
    return shuffled[:, :2] - centers.at(classes, means, own)[:, None]
