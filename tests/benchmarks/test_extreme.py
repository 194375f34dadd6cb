"""The measures and the table of the benchmark of extreme classification."""

import math

import numpy as np
import pytest
import scipy.sparse as sp

from benchmarks import extreme

TRUE = sp.csr_matrix(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]], np.float32))


def test_precision_counts_the_true_labels_among_the_best() -> None:
    found = extreme.measures([[0, 3, 1, 4, 5], [0, 1, 3, 4, 2]], TRUE, np.ones(6))
    assert found["P@1"] == pytest.approx(100 / 2)
    assert found["P@3"] == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert found["P@5"] == pytest.approx(100 * (2 / 5 + 1 / 5) / 2)
    # The highest possible sums are 1 + 1, 2 + 1 and 2 + 1.
    assert found["PSP@1"] == pytest.approx(100 * 1 / 2)
    assert found["PSP@3"] == pytest.approx(100 * 2 / 3)
    assert found["PSP@5"] == pytest.approx(100 * 3 / 3)


def test_rare_labels_weigh_more_in_the_scored_precision() -> None:
    weights = np.array([1.0, 3, 1, 1, 1, 1])
    found = extreme.measures([[0, 3, 4, 5, 2], [2, 0, 1, 3, 4]], TRUE, weights)
    assert found["PSP@1"] == pytest.approx(100 * (1 + 1) / (3 + 1))
    assert found["PSP@5"] == pytest.approx(100 * (1 + 1) / (4 + 1))


def test_propensities_are_those_of_the_paper() -> None:
    labels = sp.csr_matrix(np.repeat([[1.0, 0], [1, 1]], 50, axis=0))
    constant = (math.log(100) - 1) * 2.5**0.55
    expected = [1 + constant * math.exp(-0.55 * math.log(count + 1.5)) for count in (100, 50)]
    np.testing.assert_allclose(extreme.inverse_propensities(labels), expected)


def test_the_table_has_the_mean_and_the_interval_of_the_seeds() -> None:
    values = dict.fromkeys(extreme.MEASURES, 10.0)
    times = {"cpu_seconds": 8.0, "peak_mb": 100.0}
    runs = [
        {"library": "omikuji", "seed": seed, **values, "seconds": seconds, **times}
        for seed, seconds in enumerate((4.0, 6.0))
    ]
    *_, line = extreme.table({"runs": runs}).splitlines()
    error = 1.96 * math.sqrt(2) / math.sqrt(2)
    assert line.startswith("| omikuji | 10.0 | 10.0")
    assert line.endswith(f"| 5 ± {error:.0f} | 8 | 100 |")
