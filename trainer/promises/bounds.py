"""Exact bounds on pass rates from order statistics, and intervals of proportions.

The pass rate of a threshold t is the probability that a new sample of the class scores at or above
t. Let x_(1) <= ... <= x_(n) be the scores of n independent samples of the class, and let
t = x_(m). For a continuous distribution F, F(x_(m)) has the distribution Beta(m, n - m + 1), so the
pass rate 1 - F(x_(m)) has the distribution Beta(n - m + 1, m). With ties, the pass rate is larger.
Therefore

    P(pass rate >= r) >= P(Beta(m, n - m + 1) <= 1 - r) = P(Binomial(n, 1 - r) >= m).

The threshold guarantees the recall r with confidence c if the right-hand side is at least c. This
is the one-sided nonparametric tolerance limit of Wilks (Annals of Mathematical Statistics 12,
1941). The largest such m gives the highest threshold. Even the lowest score, m = 1, requires
1 - r^n >= c, that is, n >= ln(1 - c) / ln(r) samples:

    recall r | c = 0.8 | c = 0.9 | c = 0.95 | c = 0.99
    0.5      |       3 |       4 |        5 |        7
    0.8      |       8 |      11 |       14 |       21
    0.9      |      16 |      22 |       29 |       44
    0.95     |      32 |      45 |       59 |       90
    0.99     |     161 |     230 |      299 |      459
    0.999    |    1609 |    2302 |     2995 |     4603

Lowering a threshold never lowers the pass rate, so a margin below x_(m) keeps the guarantee.
"""

from math import ceil, log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def least_positives(recall: float, confidence: float) -> int | None:
    """Return the minimum number of samples that guarantees `recall` with `confidence`, or None for
    a recall of 1, which no number of samples guarantees.
    """
    if recall >= 1:
        return None
    # The factor corrects rounding: with r = 0.5 and c = 0.75, the quotient is 2.0000000000000004.
    return max(1, ceil(log(1 - confidence) / log(recall) * (1 - 1e-12)))


def guaranteed_rank(num_samples: ArrayLike, recall: float, confidence: float) -> IntArray:
    """Return the largest m for which the m-th lowest of `num_samples` scores guarantees `recall`
    with `confidence`. It is 0 if no score does.
    """
    from scipy.special import bdtrc, bdtrik

    samples, tail = np.asarray(num_samples, np.int64), 1 - recall
    # The solution of P(X <= k) = 1 - c in real numbers is rounded, and both neighbors are checked.
    near = np.nan_to_num(bdtrik(1 - confidence, samples, tail)).astype(np.int64)
    rank = np.zeros_like(samples)
    for candidate in (near, near + 1, near + 2):
        candidate = np.clip(candidate, 1, np.maximum(samples, 1))
        # bdtrc(k) is P(X > k).
        holds = bdtrc(candidate - 1.0, samples, tail) >= confidence
        rank = np.where(holds & (samples > 0), np.maximum(rank, candidate), rank)
    return rank


def guaranteed_pass_rates(num_samples: IntArray, rank: IntArray, confidence: float) -> FloatArray:
    """Return the pass rates [..., 3] of the `rank`-th lowest of `num_samples` scores: the mean, and
    a one-sided interval, which contains the pass rate with at least `confidence`.
    """
    from scipy.special import betaincinv

    above = num_samples - rank + 1
    lowest = betaincinv(above, rank, 1 - confidence)
    return np.stack([above / (num_samples + 1), lowest, np.ones_like(lowest)], -1)


def beta_pass_rates(alpha: ArrayLike, beta: ArrayLike, confidence: float) -> FloatArray:
    """Return the mean of a beta distribution and its central interval [..., 3]."""
    from scipy.special import betaincinv

    a, b = np.asarray(alpha, np.float64), np.asarray(beta, np.float64)
    tail = (1 - confidence) / 2
    return np.stack([a / (a + b), betaincinv(a, b, tail), betaincinv(a, b, 1 - tail)], -1)


def exact_pass_rates(passed: IntArray, num_samples: IntArray, confidence: float) -> FloatArray:
    """Return the proportion `passed` / `num_samples` and its interval [..., 3] (Clopper and
    Pearson, Biometrika 26, 1934). Without samples, they are NaN, 0 and 1.
    """
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    failed = num_samples - passed
    with np.errstate(invalid="ignore"):
        mean = passed / num_samples
    low = np.where(passed > 0, betaincinv(np.maximum(passed, 1), failed + 1, tail), 0.0)
    high = np.where(failed > 0, betaincinv(passed + 1, np.maximum(failed, 1), 1 - tail), 1.0)
    return np.stack([mean, low, high], -1)


def wilson_interval(hits: int, num_samples: int, confidence: float) -> tuple[float, float]:
    """Return the interval of a proportion (Wilson, JASA 22, 1927), with `num_samples` >= 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = hits / num_samples, z * z / num_samples
    center = share + spread / 2
    half = sqrt(spread * (share * (1 - share) + spread / 4))
    return max(0.0, (center - half) / (1 + spread)), min(1.0, (center + half) / (1 + spread))
