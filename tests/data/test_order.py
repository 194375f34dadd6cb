"""The order is a permutation for every epoch, and ranks share it without gap or overlap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import locate, permuted_index, share


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4097])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**60, 3)):
        indices = permuted_index(seed, epoch, np.arange(n), n)
        assert sorted(indices.tolist()) == list(range(n))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(permuted_index(seed, epoch, np.arange(50), 50))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_order_of_a_billion_samples_needs_no_list() -> None:
    n = 10**9 + 7
    positions = np.arange(n - 10_000, n)
    indices = permuted_index(3, 2, positions, n)
    assert len(set(indices.tolist())) == 10_000
    assert indices.min() >= 0
    assert indices.max() < n
    one = permuted_index(3, 2, positions[17:18], n)
    assert one[0] == indices[17]


def test_every_place_gets_every_sample_about_equally_often() -> None:
    n, trials = 10, 5_000
    counts = np.zeros((n, n))
    for epoch in range(trials):
        counts[np.arange(n), permuted_index(1, epoch, np.arange(n), n)] += 1
    expected = trials / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 81 degrees of freedom: mean 81, standard deviation 12.7.
    assert chi_square < 81 + 6 * 12.7


def test_neighbours_in_an_epoch_are_unrelated() -> None:
    n = 50_000
    indices = permuted_index(0, 0, np.arange(n), n).astype(float)
    assert abs(np.corrcoef(indices[:-1], indices[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(indices, np.arange(n))[0, 1]) < 0.02
    gaps = np.abs(np.diff(indices))
    assert abs(gaps.mean() / n - 1 / 3) < 0.01


def test_position_outside_an_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="position 5 is not in an epoch of 5"):
        permuted_index(0, 0, np.array([5]), 5)


@given(count=st.integers(0, 1000), world_size=st.integers(1, 50))
def test_shares_cover_a_batch_once_and_differ_by_one_at_most(count: int, world_size: int) -> None:
    shares = [share(count, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(deadline=None)
@given(
    n=st.integers(1, 300),
    batch=st.integers(1, 64),
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 12)), max_size=5),
    seed=st.integers(0, 2**32),
)
def test_resuming_on_any_world_sizes_sees_each_sample_of_an_epoch_once(
    n: int, batch: int, steps: list[tuple[int, int]], seed: int
) -> None:
    """Run `count` steps on `world_size` ranks, resume on another world size, and so on."""
    samples, seen = 0, []
    for world_size, count in [*steps, (1, -(-n // batch))]:
        for _ in range(count):
            for rank in range(world_size):
                part = share(batch, rank, world_size)
                positions = np.arange(samples + part.start, samples + part.stop)
                epochs, indices = locate(seed, positions, n)
                seen += zip(epochs.tolist(), indices.tolist(), strict=True)
            samples += batch
    assert len(seen) == len(set(seen)) == samples
    for epoch in range(samples // n):
        assert sum(e == epoch for e, _ in seen) == n
