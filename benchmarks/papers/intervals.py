"""Means over seeds with their 95% confidence intervals (Student's t)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Mean:
    """`value` of `n` numbers, +- `half` with 95% confidence; infinite for a single one."""

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
        """`0.123 ± 0.004`; the value alone where one number says nothing of the spread."""
        shown = f"{self.value:.{digits}f}"
        return shown if math.isinf(self.half) else f"{shown} ± {self.half:.{digits}f}"

    def percent(self, digits: int = 1) -> str:
        """The same of a share, in percent."""
        return Mean(100 * self.value, 100 * self.half, self.n).text(digits)


def mean(numbers: Sequence[float]) -> Mean:
    """Raises ValueError for no numbers."""
    values = np.asarray(numbers, dtype=np.float64)
    if not values.size:
        raise ValueError("a mean of no numbers")
    if values.size == 1:
        return Mean(float(values[0]), math.inf, 1)
    half = stats.t.ppf(0.975, values.size - 1) * stats.sem(values)
    return Mean(float(values.mean()), float(half), values.size)


def shown(found: Mean | None, digits: int = 3) -> str:
    """A table cell; None is a comparison of a model with itself."""
    return "degenerate" if found is None else found.text(digits)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Mean:
    """Of pairs, such as two losses at the same seed: it varies less than the means do."""
    if len(ours) != len(theirs):
        raise ValueError(f"pairs of {len(ours)} and {len(theirs)} numbers")
    return mean([a - b for a, b in zip(ours, theirs, strict=True)])
