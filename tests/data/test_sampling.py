"""A sampled order gives every group its exact share, draws the samples of a group equally often,
and keeps the guarantees of the plain order: it depends neither on the number of ranks and workers
nor on where a run was resumed.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.config import DataConfig, SamplingConfig
from data.images.config import ImageConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.loading.order import permuted_in_groups
from data.loading.sampling import (
    _PERIOD,
    Groups,
    SampledOrder,
    class_groups,
    class_shares,
    sampled_order,
    training_counts,
)
from data.shards.split import open_split
from tests.data.rank_batches import sample_labels

SEEDS = st.integers(0, 2**63 - 1)
POWERS = st.sampled_from([0.0, 0.3, 0.5, 1.0])
# Many classes with one or a few samples, and some large classes.
SIZES = st.lists(st.sampled_from([1, 1, 1, 2, 3, 40]), min_size=1, max_size=40)


def labels_of(sizes: list[int], seed: int = 0) -> np.ndarray:
    """Return shuffled labels of `sizes[c]` samples of each class c, int32 [N]."""
    labels = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    return np.random.default_rng(seed).permutation(labels)


def order_of(
    sizes: list[int], power: float, seed: int, epoch: int | None = None
) -> tuple[np.ndarray, SampledOrder]:
    labels = labels_of(sizes)
    groups = class_groups(labels, len(sizes), power)
    return labels, SampledOrder(seed, groups, epoch or len(labels))


def test_every_position_of_a_small_group_gets_every_sample_about_equally_often() -> None:
    size, trials = 5, 4000
    position, group = np.tile(np.arange(size), trials), np.repeat(np.arange(trials), size)
    indices = permuted_in_groups(1, group, group % 3, position, np.full(len(group), size))
    counts = np.zeros((size, size))
    np.add.at(counts, (position, indices), 1)
    chi_square = ((counts - trials / size) ** 2 / (trials / size)).sum()
    assert chi_square < 16 + 6 * math.sqrt(2 * 16)  # 16 degrees of freedom


def test_powers_give_natural_square_root_and_balanced_shares() -> None:
    counts = np.array([900, 0, 100])
    for power, expected in (
        (1.0, [0.9, 0, 0.1]),
        (0.5, [0.75, 0, 0.25]),
        (0.0, [0.5, 0, 0.5]),
    ):
        assert np.allclose(class_shares(counts, power), expected, atol=1e-7)


@given(sizes=SIZES, power=POWERS, seed=SEEDS, epoch=st.none() | st.integers(1, 200))
def test_groups_get_their_shares_and_their_samples_are_drawn_equally_often(
    sizes: list[int], power: float, seed: int, epoch: int | None
) -> None:
    labels, order = order_of(sizes, power, seed, epoch)
    n, epochs = order.num_samples, 5
    passes, indices = order.locate(np.arange(epochs * n))
    shares = class_shares(np.array(sizes), power)
    for count in range(1, epochs + 1):
        drawn = np.bincount(labels[indices[: count * n]], minlength=len(sizes))
        assert drawn.sum() == count * n
        assert np.abs(drawn - count * n * shares).max() < 2 + math.log2(count)
        times = np.bincount(indices[: count * n], minlength=len(labels))
        for label in range(len(sizes)):
            assert np.ptp(times[labels == label]) <= 1
    # The pass counts the earlier occurrences of a sample.
    assert len(set(zip(passes.tolist(), indices.tolist(), strict=True))) == epochs * n
    times = np.bincount(indices, minlength=len(labels))
    assert np.array_equal(np.sort(passes), np.sort(np.concatenate([np.arange(t) for t in times])))


@given(sizes=SIZES, power=POWERS, seed=SEEDS)
def test_shares_are_exact_over_a_period_of_epochs(
    sizes: list[int], power: float, seed: int
) -> None:
    n, shares = sum(sizes), class_shares(np.array(sizes), power)
    # Each group has one sample, so a pass is the number of earlier slots of its group.
    order = SampledOrder(seed, Groups(np.ones(len(sizes), np.int64), shares), n)
    for periods in (1, 3):
        first = periods * _PERIOD * n
        passes, groups = order.locate(np.arange(first, first + n))
        for group in np.unique(groups):
            # Shares are rounded to 1 / _PERIOD of a slot per epoch.
            assert abs(passes[groups == group].min() - first * shares[group]) <= periods
    late = (7 * _PERIOD + 11) * n
    passes, groups = order.locate(np.arange(late, late + 2 * n))
    for group in np.unique(groups):
        assert (np.diff(np.sort(passes[groups == group])) == 1).all()


def test_the_samples_of_each_class_are_drawn_in_a_new_random_order_in_each_pass() -> None:
    labels, order = order_of([200, 200], 0.0, seed=2, epoch=40)
    drawn = order.locate(np.arange(1200))[1]
    orders = []
    for label in (0, 1):
        members = np.flatnonzero(labels == label)
        epochs = np.searchsorted(members, drawn[labels[drawn] == label]).reshape(30, 20)
        # Each pass over a class takes 10 epochs.
        assert len({tuple(sorted(samples.tolist())) for samples in epochs}) == 30
        assert min(np.ptp(samples) for samples in epochs) > 60
        orders.append(epochs[:10].tolist())
    assert orders[0] != orders[1]


def test_an_order_of_many_groups_is_computed_without_a_list() -> None:
    """A billion samples in a million groups, at an epoch in the middle of a long run."""
    sizes = np.full(10**6, 1000)
    order = SampledOrder(1, Groups(sizes, np.full(10**6, 1e-6)), 10**9)
    positions = np.arange(300 * 10**9 - 500, 300 * 10**9 + 500)
    passes, indices = order.locate(positions)
    assert set(passes.tolist()) == {299, 300}
    assert len(set(indices.tolist())) == 1000


@given(
    sets=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=40),
    power=st.sampled_from([0.0, 0.5]),
    seed=SEEDS,
)
def test_a_sample_with_a_set_is_drawn_from_the_group_of_each_of_its_labels(
    sets: list[set[int]], power: float, seed: int
) -> None:
    offsets = np.cumsum([0, *map(len, sets)])
    labels = np.array([label for one in sets for label in sorted(one)], np.int32)
    groups = class_groups(labels, 5, power, offsets)
    counts = np.bincount(labels, minlength=5)
    empty = [i for i, one in enumerate(sets) if not one]
    expected = [[i for i, one in enumerate(sets) if label in one] for label in range(5)]
    members = np.split(groups.members, np.cumsum(groups.sizes)[:-1])
    assert [one.tolist() for one in members] == [one for one in [*expected, empty] if one]
    shares = class_shares(counts, power) * (1 - len(empty) / len(sets))
    shares = [*shares[counts > 0], *[len(empty) / len(sets)] * bool(empty)]
    assert np.allclose(groups.shares, shares)
    order, n = SampledOrder(seed, groups, len(sets)), 6 * len(sets)
    passes, indices = order.locate(np.arange(n))
    # Augmentation is keyed by the pass and the sample.
    assert len(set(zip(passes.tolist(), indices.tolist(), strict=True))) == n
    drawn = np.bincount(indices, minlength=len(sets))
    each = np.bincount(groups.members, np.repeat(groups.shares / groups.sizes, groups.sizes))
    assert np.abs(drawn - n * np.pad(each, (0, len(sets) - len(each)))).max() < 6 * 4


@pytest.mark.parametrize("config", [{"power": 0.0}, {"power": 0.5}, {"power": 1.0}])
def test_the_expected_counts_of_sampled_sets_are_those_of_an_epoch(
    label_sets: Path, config: dict[str, float]
) -> None:
    settings = DataConfig(
        shards=label_sets,
        image=ImageConfig(size=12),
        sampling=SamplingConfig(**config, epoch_samples=3000),
    )
    with open_split(label_sets, "train") as split:
        indices = sampled_order(split, settings, seed=1).locate(np.arange(3000))[1]
        labels = [label for one in sample_labels(split, indices) for label in one]
        drawn = np.bincount(labels, minlength=3)
        assert np.abs(drawn - training_counts(split, settings)).max() <= 6


def test_a_sample_that_occurs_twice_in_an_epoch_is_augmented_differently(shards: Path) -> None:
    settings = DataConfig(
        shards=shards,
        image=ImageConfig(size=12, resize=14),
        sampling=SamplingConfig(power=0.0, epoch_samples=200),
    )
    with open_split(shards, "train") as split:
        batch = next(TrainLoader(split, settings, global_batch=200, cursor=Cursor(0)))
        counts = torch.bincount(batch.labels, minlength=4)
        expected = training_counts(split, settings)
    assert counts.tolist() == expected.tolist() == [50] * 4
    first = batch.indices == batch.indices[0]
    assert first.sum() > 2
    pixels = batch.inputs["pixel_values"][first].flatten(1)
    assert len(torch.unique(pixels, dim=0)) > 2


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"shuffle_shards": 2}, "remove data.shuffle_shards"),
        ({"stream": {"shards": "a.tar", "samples": 3}}, "remove data.stream"),
    ],
)
def test_sampling_is_rejected_where_it_is_not_supported(others: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(shards="a", sampling={"power": 0.5}, **others)
