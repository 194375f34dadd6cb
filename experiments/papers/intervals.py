"""Means over seeds with 95% confidence intervals (Student's t)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Mean:
    """The mean `value` of `n` numbers. `half` is half the width of its 95% confidence interval.

    With one number, `half` is infinite.
    """

    value: float
    half: float
    n: int

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def text(self, digits: int = 3) -> str:
        """Return `0.123 ± 0.004`, or only the value if the interval is infinite."""
        shown = f"{self.value:.{digits}f}"
        return shown if math.isinf(self.half) else f"{shown} ± {self.half:.{digits}f}"

    def percent(self, digits: int = 1) -> str:
        """Return a fraction as text in percent."""
        return Mean(100 * self.value, 100 * self.half, self.n).text(digits)


def mean(numbers: Sequence[float]) -> Mean:
    """Return the mean with its interval. Raises ValueError if `numbers` is empty."""
    values = np.asarray(numbers, dtype=np.float64)
    if not values.size:
        raise ValueError("cannot take the mean of an empty sequence: pass at least one number")
    if values.size == 1:
        return Mean(float(values[0]), math.inf, 1)
    half = stats.t.ppf(0.975, values.size - 1) * stats.sem(values)
    return Mean(float(values.mean()), float(half), values.size)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Mean:
    """Return the mean difference of pairs, such as two losses with the same seed.

    It varies less than the difference of the means.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"cannot pair {len(ours)} numbers with {len(theirs)}: pass sequences of equal length"
        )
    return mean([a - b for a, b in zip(ours, theirs, strict=True)])
