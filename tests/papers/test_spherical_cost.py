"""Step time by number of classes and features, at toy size, and the fit of its exponent."""

from collections.abc import Callable

import numpy as np
import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.spherical_cost import EXPERIMENT, slope
from experiments.papers.section import Section


def test_a_slope_is_the_fitted_exponent_with_an_interval_over_rounds() -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.01, size=(3, 20))
    seconds = {size: (size**1.5 * noise[i]).tolist() for i, size in enumerate((10, 100, 1_000))}
    found = slope(seconds)
    assert found.value == pytest.approx(1.5, abs=0.01)
    assert found.n == 20
    assert 0 < found.half < 0.01


def test_both_heads_are_timed_by_classes_and_by_features(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    by_classes, by_dims = section.tables
    assert [row[0] for row in by_classes.rows] == ["factored", "dense"]
    assert by_classes.header[1:3] == ["D = 100", "D = 1,000"]
    assert by_dims.header[1:3] == ["d = 8", "d = 16"]
    assert len(section.claims) == 2
