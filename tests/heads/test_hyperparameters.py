"""A loss made in code refuses the hyperparameters that a recipe refuses."""

import math
from typing import Any

import pytest
import torch

from heads.losses import LOSSES, NoiseContrastiveEstimation
from tests.heads.cases import noise

NOT_FINITE = (math.nan, math.inf, -math.inf)
# (loss, hyperparameter): values outside its bounds, and one on or near its bound.
BOUNDS: dict[tuple[str, str], tuple[tuple[float, ...], float]] = {
    ("ce", "label_smoothing"): ((-0.1, 1.0), 0.0),
    ("ce", "z_loss"): ((-1e-9,), 0.0),
    ("ce", "sample_rate"): ((0.0, 1.5), 1.0),
    ("self_norm", "alpha"): ((0.0, -1.0), 1e-9),
    ("max_margin", "gamma"): ((0.0, -1.0), 1e-9),
    ("batch_max_margin", "gamma"): ((0.0, -1.0), 1e-9),
    ("nce", "t"): ((0, 0.5, -3), 1),
    ("topk_hinge", "k"): ((0, -1), 1),
    ("topk_hinge", "alpha"): ((-1e-9,), 0.0),
    ("smooth_topk", "k"): ((0, 101), 1),
    ("smooth_topk", "tau"): ((0.0, -1.0), 1e-9),
    ("smooth_topk", "alpha"): ((-1e-9,), 0.0),
    ("ccql", "w"): ((-1e-9,), 0.0),
    ("spherical_softmax", "eps"): ((0.0, -1.0), 1e-9),
    ("spherical_bound", "xi"): ((0.0, -1.0), 1e-9),
    ("simloss", "lower"): ((-1.1, 1.0), -1.0),
}
NEEDS: dict[str, dict[str, Any]] = {
    "nce": {"noise": noise(4)},
    "simloss": {"vectors": torch.eye(4)},
}
REFUSED = [
    (kind, name, value)
    for (kind, name), (outside, _) in BOUNDS.items()
    for value in (*outside, *NOT_FINITE)
]


@pytest.mark.parametrize(("kind", "name", "value"), REFUSED)
def test_a_hyperparameter_out_of_bounds_is_refused_in_one_line(kind, name, value):
    with pytest.raises(ValueError, match=rf"^{kind} {name} is {value}: give ") as caught:
        LOSSES[kind](**NEEDS.get(kind, {}), **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), BOUNDS)
def test_a_hyperparameter_at_its_bound_is_taken(kind, name):
    _, bound = BOUNDS[kind, name]
    assert getattr(LOSSES[kind](**NEEDS.get(kind, {}), **{name: bound}), name) == bound


def test_no_w_and_no_number_of_samples_are_taken():
    assert LOSSES["ccql"](w=None).w is None
    assert LOSSES["nce"](**NEEDS["nce"], samples=None).samples is None


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ([3.0, 5.0, 2.0], r"^nce noise sums to 10: divide it by its sum$"),
        ([0.5, 0.25, 0.2], r"^nce noise sums to 0\.95: divide it by its sum$"),
        ([0.5, math.inf, 0.2], r"^nce noise sums to inf: "),
        ([], r"^nce noise sums to 0: "),
        ([1.0, 0.0], r"^nce needs a noise distribution that is positive"),
        ([1.0, math.nan], r"^nce needs a noise distribution that is positive"),
    ],
)
def test_noise_that_is_no_distribution_is_refused(q, message):
    with pytest.raises(ValueError, match=message):
        NoiseContrastiveEstimation(torch.tensor(q))


def test_noise_of_very_many_classes_in_float32_is_taken():
    counts = torch.arange(1, 1_000_001, dtype=torch.float32)
    NoiseContrastiveEstimation(counts / counts.sum())
