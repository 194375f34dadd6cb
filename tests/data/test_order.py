"""Every epoch is a permutation, and ranks divide it without gaps or overlaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.loading.order import Order, permuted_index, share


@pytest.mark.parametrize("n", [1, 2, 5, 16, 17, 4097])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**60, 3)):
        indices = permuted_index(seed, epoch, np.arange(n), n)
        assert sorted(indices.tolist()) == list(range(n))


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {
        tuple(permuted_index(seed, epoch, np.arange(50), 50))
        for seed in (0, 1, 5, 5 + 2**32, 5 + 2**33)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_an_order_of_a_billion_samples_is_computed_without_a_list() -> None:
    n = 10**9 + 7
    positions = np.arange(n - 10_000, n)
    indices = permuted_index(3, 2, positions, n)
    assert len(set(indices.tolist())) == 10_000
    assert indices.min() >= 0
    assert indices.max() < n
    one = permuted_index(3, 2, positions[17:18], n)
    assert one[0] == indices[17]


def test_every_position_gets_every_sample_about_equally_often() -> None:
    n, trials = 10, 5_000
    counts = np.zeros((n, n))
    for epoch in range(trials):
        counts[np.arange(n), permuted_index(1, epoch, np.arange(n), n)] += 1
    expected = trials / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 81 degrees of freedom: mean 81, standard deviation 12.7.
    assert chi_square < 81 + 6 * 12.7


@given(count=st.integers(0, 1000), world_size=st.integers(1, 50))
def test_shares_cover_a_batch_once_and_their_sizes_differ_by_at_most_one(
    count: int, world_size: int
) -> None:
    shares = [share(count, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# -------------------------------------------------------------------- an order with locality

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**63 - 1)


def shard_of(indices: np.ndarray, sizes: list[int]) -> np.ndarray:
    return np.searchsorted(np.cumsum(sizes), indices, side="right")


@given(sizes=SIZES, shuffle=st.none() | st.integers(1, 14), seed=SEEDS)
def test_every_epoch_of_an_order_contains_each_sample_once(
    sizes: list[int], shuffle: int | None, seed: int
) -> None:
    order, n = Order(seed, sizes, shuffle), sum(sizes)
    epochs, indices = order.locate(np.arange(3 * n))
    assert np.array_equal(epochs, np.arange(3 * n) // n)
    assert np.array_equal(np.sort(indices.reshape(3, n), axis=1), np.tile(np.arange(n), (3, 1)))


@given(sizes=SIZES, shuffle=st.integers(1, 14), seed=SEEDS)
def test_a_group_contains_at_most_shuffle_shards_shards(
    sizes: list[int], shuffle: int, seed: int
) -> None:
    order, n = Order(seed, sizes, shuffle), sum(sizes)
    positions = np.arange(2 * n)
    shards = shard_of(order.locate(positions)[1], sizes)
    groups = np.array([order.group(int(position)) for position in positions])
    assert np.array_equal(np.unique(groups), np.arange(2 * order.num_groups))
    assert np.all(np.diff(groups) >= 0)
    for group in np.unique(groups).tolist():
        assert sorted(set(shards[groups == group].tolist())) == sorted(order.shards(group))
        assert 1 <= len(order.shards(group)) <= order.shards_at_once <= shuffle


@given(
    sizes=SIZES,
    shuffle=st.none() | st.integers(1, 14),
    seed=SEEDS,
    positions=st.lists(st.integers(0, 400), min_size=1, max_size=60),
)
def test_a_position_maps_to_the_same_sample_on_its_own_and_in_a_batch(
    sizes: list[int], shuffle: int | None, seed: int, positions: list[int]
) -> None:
    together = np.stack(Order(seed, sizes, shuffle).locate(np.array(positions)))
    order = Order(seed, sizes, shuffle)
    one_by_one = [np.stack(order.locate(np.array([position])))[:, 0] for position in positions]
    assert np.array_equal(together, np.stack(one_by_one, axis=1))
    assert np.array_equal(together, np.stack(order.locate(np.array([positions])))[:, 0])


def test_shards_and_samples_are_reordered_for_every_epoch_and_seed() -> None:
    sizes = [40] * 12
    visits, insides = set(), set()
    for seed in range(3):
        order = Order(seed, sizes, 3)
        for epoch in range(3):
            visits.add(tuple(s for g in range(4) for s in order.shards(4 * epoch + g)))
            indices = order.locate(np.arange(480) + 480 * epoch)[1]
            insides |= {tuple(indices[shard_of(indices, sizes) == s] % 40) for s in range(12)}
    assert len(visits) == 9
    assert len(insides) == 9 * 12


@pytest.mark.parametrize("n", [1, 2, 10, 2000, 70_000])
def test_tables_do_not_change_the_order(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = np.random.default_rng(0).integers(0, n, (20, 10))
    with_tables = permuted_index(2**40, 3, positions, n, part=2)
    monkeypatch.setattr("data.loading.order._MAX_TABLE_BITS", 0)
    assert np.array_equal(permuted_index(2**40, 3, positions, n, part=2), with_tables)
    assert with_tables.shape == (20, 10)


def test_the_order_is_that_of_the_documentation() -> None:
    assert permuted_index(0, 0, np.arange(10), 10).tolist() == [4, 6, 8, 9, 0, 2, 5, 7, 3, 1]
    assert permuted_index(0, 1, np.arange(10), 10).tolist() == [9, 0, 1, 5, 2, 6, 4, 7, 8, 3]
