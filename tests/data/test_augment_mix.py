"""Mixup and CutMix of image pairs: both images share a draw, and weights match the pixels
exactly."""

import numpy as np
import pytest

from data.augment.base import pair_rng
from data.augment.mix import Mix, MixDraw


def draws(number: int = 3000, **mix: float) -> list[MixDraw]:
    return [Mix(**mix).draw(24, pair_rng(5, 2 * n)) for n in range(number)]


def test_both_images_of_a_pair_share_a_draw_and_pairs_differ() -> None:
    drawn = [pair_rng(0, position).random() for position in range(200)]
    assert drawn[::2] == drawn[1::2]
    assert len(set(drawn)) == 100
    assert pair_rng(1, 0).random() != drawn[0]
    assert pair_rng(0, 2**41 + 1).random() == pair_rng(0, 2**41).random()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("weight", [0.0, 1 / 3, 0.77])
def test_mixup_rounds_the_weighted_mean(weight: float, channels: int) -> None:
    rng = np.random.default_rng(channels)
    first, second = rng.integers(0, 256, (2, channels, 24, 24), dtype=np.uint8)
    exact = weight * first + (1 - weight) * second
    found = MixDraw("mixup", weight)(first, second)
    assert found.dtype == np.uint8
    assert found.shape == first.shape
    assert np.abs(found - exact).max() <= 0.5 + 1e-4  # halves may be rounded up or down
    other = MixDraw("mixup", weight)(second, first).astype(int)
    assert np.abs(found + other - (first.astype(int) + second)).max() <= 1


def test_the_cutmix_weight_is_the_fraction_of_pixels_kept() -> None:
    own, other = np.zeros((3, 24, 24), np.uint8), np.ones((3, 24, 24), np.uint8)
    weights = []
    for mix in draws(cutmix_alpha=1):
        assert mix.kind == "cutmix"
        found = mix(own, other)
        assert mix.weight == 1 - found.mean()
        top, left, height, width = mix.box
        assert found[:, top : top + height, left : left + width].all()
        assert np.array_equal(mix(other, own), 1 - found)
        weights.append(mix.weight)
    assert min(weights) < 0.05
    assert max(weights) > 0.95
    assert not own.any()


@pytest.mark.parametrize("alpha", [1e-6, 8.0])
def test_mixup_draws_its_weight_from_beta(alpha: float) -> None:
    weights = np.array([mix.weight for mix in draws(mixup_alpha=alpha)])
    assert ((weights >= 0) & (weights <= 1)).all()
    assert abs(weights.mean() - 0.5) < 0.03
    assert abs(weights.var() - 1 / (4 * (2 * alpha + 1))) < 0.01


def test_mixup_cutmix_and_unmixed_pairs_are_drawn_at_the_configured_rates() -> None:
    drawn = draws(mixup_alpha=0.2, cutmix_alpha=1, cutmix_share=0.25, probability=0.8)
    kinds = [mix.kind for mix in drawn]
    assert abs(kinds.count("none") / len(kinds) - 0.2) < 0.03
    assert abs(kinds.count("cutmix") / len(kinds) - 0.2) < 0.03
    assert {mix.weight for mix in drawn if mix.kind == "none"} == {1.0}
    assert {mix.kind for mix in draws(200, mixup_alpha=1)} == {"mixup"}
    assert {mix.kind for mix in draws(200, cutmix_alpha=1)} == {"cutmix"}
