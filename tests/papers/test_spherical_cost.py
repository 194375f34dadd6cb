"""Step time by number of classes and features, at toy size, and the fit of its exponent."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.spherical_cost import EXPERIMENT, slope
from experiments.papers.section import Section


def test_a_slope_is_the_exponent_fitted_to_medians() -> None:
    seconds = {size: [size**1.5, 0.9 * size**1.5, 100.0 * size] for size in (10, 100, 1_000)}
    assert slope(seconds) == pytest.approx(1.5)


def test_both_heads_are_timed_by_classes_and_by_features(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    by_classes, by_dims = section.tables
    assert [row[0] for row in by_classes.rows] == ["factored", "dense"]
    assert by_classes.header[1:3] == ["D = 100", "D = 1,000"]
    assert by_dims.header[1:3] == ["d = 8", "d = 16"]
    assert len(section.claims) == 2
    assert "repeated 2 times with new heads" in section.setup
    assert all(" ± " in row[-1] for table in section.tables for row in table.rows)
