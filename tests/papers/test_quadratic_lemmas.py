"""The closed forms behind paper 001's lemmas."""

import numpy as np
import pytest

from experiments.papers.experiments.quadratic_lemmas import (
    Mixture,
    ccql_bound,
    ccql_minimizer,
    least_quadratic,
    minimizer,
    simulated,
)
from heads.losses import CorrectClassQuadratic, Quadratic

_SIGMA = 0.4


def _every_direction(centers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a finite sample, spread along every axis, whose moments equal those of the mixture."""
    k, d = centers.shape
    steps = np.concatenate([np.eye(d), -np.eye(d)]) * _SIGMA * np.sqrt(d)
    labels = np.repeat(np.arange(k), 2 * d)
    return centers[labels] + np.tile(steps, (k, 1)), labels


@pytest.mark.parametrize(("k", "d"), [(4, 6), (7, 3)])
def test_the_corrected_lemma_34_is_exact_on_a_sample_with_the_moments_of_the_mixture(
    k: int, d: int
) -> None:
    centers = Mixture(k, d, _SIGMA).centers(0)
    features, labels = _every_direction(centers)
    best = minimizer(centers, k * _SIGMA**2)
    least = simulated(Quadratic(), best, features, labels)
    assert least == pytest.approx(least_quadratic(centers, _SIGMA), rel=1e-12)
    nudge = np.random.default_rng(0).normal(size=best.shape) * 1e-3
    for theta in (best + nudge, best - nudge, minimizer(centers, _SIGMA**2)):
        assert simulated(Quadratic(), theta, features, labels) > least


@pytest.mark.parametrize("w", [0.0, 1.5, 500.0])
def test_the_least_ccql_is_computed_exactly_and_is_a_minimum(w: float) -> None:
    centers = Mixture(5, 3, _SIGMA).centers(1)
    features, labels = _every_direction(centers)
    best, least = ccql_minimizer(centers, _SIGMA, w)
    loss = CorrectClassQuadratic(w=w)
    assert simulated(loss, best, features, labels) == pytest.approx(least, rel=1e-12)
    nudge = np.random.default_rng(0).normal(size=best.shape) * 1e-3
    for theta in (best + nudge, best - nudge):
        assert simulated(loss, theta, features, labels) > least
    # The bound of Lemma 3.5 does not depend on w, but the loss does.
    assert (least <= ccql_bound(centers, _SIGMA)) == (w < 100)
    assert least >= w / 2 * _SIGMA**2 / (1 + _SIGMA**2)


def test_ccql_without_weighting_is_the_quadratic_loss() -> None:
    centers = Mixture(6, 4, _SIGMA).centers(2)
    rows, least = ccql_minimizer(centers, _SIGMA, 0.0)
    assert least == pytest.approx(least_quadratic(centers, _SIGMA))
    np.testing.assert_allclose(rows, minimizer(centers, 6 * _SIGMA**2))
