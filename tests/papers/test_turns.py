"""Ratios of alternating measurements, and confidence intervals of their medians."""

import numpy as np
import pytest

from experiments.papers.turns import median, ratio


def test_the_95_percent_bounds_of_a_median_are_order_statistics() -> None:
    found = median([9, 1, 8, 2, 7, 3, 6, 4, 5])
    assert (found.value, found.low, found.high, found.n) == (5, 2, 8, 9)  # 96.1%, as printed


def test_a_median_of_few_rounds_has_no_interval_and_settles_nothing() -> None:
    found = median([3.0, 3.1, 2.9])
    assert found.text() == "3.00"
    assert found.above(1) == "not settled"


@pytest.mark.parametrize(("least", "expected"), [(1, "holds"), (9, "does not hold")])
def test_a_ratio_is_computed_within_each_round(least: float, expected: str) -> None:
    ours = np.array([1.0, 10.0, 100.0] * 3)  # other load on the machine slows down both
    found = ratio((4 * ours).tolist(), ours.tolist())
    assert found.text() == "4.00 (4.00 to 4.00)"
    assert found.above(least) == expected
