"""The global order of samples, a pure function of (seed, epoch), and each rank's share of it.

An order is a keyed permutation, not a stored list. Any position of any epoch takes the same time to
compute, and resuming needs no replay. `ByLength` sorts windows of an order to reduce padding.
`data/loading/loader.py` decides which rank reads what.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1
# Maps stream positions, int64 [n], to their epochs and sample indices, int64 [n] each.
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_LENGTHS = 0x6C656E67  # "leng": separates these random draws from those of the order


def permuted_index(
    seed: int, epoch: int, position: np.ndarray, num_samples: int, *, part: int | None = None
) -> np.ndarray:
    """Return the sample indices at `position` (int64 [...]) of an epoch's order.

    Each position must be in [0, num_samples), else ValueError is raised.

    part: selects an independent order of the same epoch. For each (seed, epoch, part) the result is
    a bijection of [0, num_samples): a Feistel network over the next power of four, applied
    repeatedly until the value is below `num_samples` (cycle walking; Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains"). The expected number of applications is below four.
    """
    position = np.asarray(position)
    if len(outside := position[(position < 0) | (position >= num_samples)]):
        raise ValueError(f"position {outside[0]} is not in an epoch of {num_samples} samples")
    half = np.uint64(max(1, -(-(num_samples - 1).bit_length() // 2)))
    keys = _round_keys(seed, epoch, part)
    value = _feistel(position.astype(np.uint64), half, keys)
    while len(walking := np.flatnonzero(value >= np.uint64(num_samples))):
        value.flat[walking] = _feistel(value.flat[walking], half, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: np.uint64, keys: list[int]) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << half) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014). uint64 arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(seed: int, epoch: int, part: int | None) -> list[int]:
    spawn_key = () if part is None else (part,)
    # Each word has a fixed index. SeedSequence splits a large seed into two words, and the upper
    # one would otherwise take the index of the epoch.
    words = [seed & 0xFFFFFFFF, epoch, seed >> 32]
    sequence = np.random.SeedSequence(words, spawn_key=spawn_key)
    state = sequence.generate_state(_ROUNDS, np.uint64)
    return [int(key) & _MASK for key in state]


class _Epoch(NamedTuple):
    """The shards of an epoch in its order.

    shards: int64 [S]. starts: number of samples before each shard, int64 [S + 1]. groups: first
    sample of each group, int64 [G + 1].
    """

    shards: np.ndarray
    starts: np.ndarray
    groups: np.ndarray


class Order:
    """Maps each position of the endless stream of epochs to a sample.

    If `shuffle_shards` is None, every epoch is one permutation of all samples. If it is N, an epoch
    permutes the shards, divides them into groups of at most N of nearly equal count, and permutes
    the samples inside each group. Consecutive reads then touch one group, or two at a boundary.
    Memory: a few numbers per shard.
    """

    def __init__(
        self, seed: int, shard_sizes: Sequence[int], shuffle_shards: int | None = None
    ) -> None:
        """shard_sizes: number of samples of each shard, all above 0, in the order of the split."""
        self.seed = seed
        self.num_samples = sum(shard_sizes)
        num_shards = len(shard_sizes)
        self.num_groups = 1 if shuffle_shards is None else -(-num_shards // shuffle_shards)
        self.is_global = shuffle_shards is None
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        self._bounds = np.arange(self.num_groups + 1) * num_shards // self.num_groups
        self._epochs: dict[int, _Epoch] = {}

    @property
    def shards_at_once(self) -> int:
        """The number of shards in the largest group."""
        return int(np.diff(self._bounds).max())

    @property
    def samples_at_least(self) -> int:
        """A lower bound on the number of samples in any group of any epoch."""
        fewest = int(np.diff(self._bounds).min())
        return int(np.sort(self._sizes)[:fewest].sum())

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, sample index), int64 [...] each, at `positions` (int64 [...], >= 0)."""
        epochs, inside = np.divmod(np.asarray(positions, dtype=np.int64), self.num_samples)
        indices = np.empty_like(inside)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            if self.is_global:
                indices[here] = permuted_index(self.seed, epoch, inside[here], self.num_samples)
            else:
                indices[here] = self._inside(epoch, inside[here])
        return epochs, indices

    def group(self, position: int) -> int:
        """Return the number of the group at a position, counted over all epochs."""
        epoch, inside = divmod(position, self.num_samples)
        groups = self._epoch(epoch).groups
        return epoch * self.num_groups + int(np.searchsorted(groups, inside, side="right")) - 1

    def shards(self, group: int) -> list[int]:
        """Return the shards of a group, as positions in the split."""
        epoch, number = divmod(group, self.num_groups)
        shards = self._epoch(epoch).shards[self._bounds[number] : self._bounds[number + 1]]
        return [int(shard) for shard in shards]

    def _inside(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return sample indices at `positions` (int64 [N]) of an epoch with several groups."""
        shards, starts, groups = self._epoch(epoch)
        numbers = np.searchsorted(groups, positions, side="right") - 1
        permuted = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            # Group number `number` covers positions [first, end) of the epoch. It is permuted
            # within itself.
            here, (first, end) = numbers == number, groups[number : number + 2].tolist()
            permuted[here] = first + permuted_index(
                self.seed, epoch, positions[here] - first, end - first, part=number
            )
        visit = np.searchsorted(starts, permuted, side="right") - 1
        indices: np.ndarray = self._first[shards[visit]] + permuted - starts[visit]
        return indices

    def _epoch(self, number: int) -> _Epoch:
        """Cache two epochs, because a batch may straddle the boundary between them."""
        if number not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            everyone = np.arange(len(self._sizes))
            shards = permuted_index(
                self.seed, number, everyone, len(everyone), part=self.num_groups
            )
            starts = np.concatenate([[0], np.cumsum(self._sizes[shards])])
            self._epochs[number] = _Epoch(shards, starts, starts[self._bounds])
        return self._epochs[number]


class InOrder:
    """The samples of a split in stored order, once, shard by shard. Evaluation uses this order."""

    def __init__(self, shard_sizes: Sequence[int]) -> None:
        self._first = np.cumsum([0, *shard_sizes])

    def group(self, position: int) -> int:
        """Return the shard that contains a position."""
        return int(np.searchsorted(self._first, position, side="right")) - 1

    def shards(self, group: int) -> list[int]:
        """Return that shard, or an empty list after the last one."""
        return [group] if group < len(self._first) - 1 else []


def share(count: int, rank: int, world_size: int) -> range:
    """Return the part of `count` items for `rank`.

    Parts differ by at most one item and may be empty.
    """
    return range(count * rank // world_size, count * (rank + 1) // world_size)


class ByLength:
    """An order whose windows of `num_batches` batches are sorted by length.

    locate: the underlying order. lengths: maps samples, int64 [n], to their lengths [n].
    """

    def __init__(
        self,
        locate: Locate,
        lengths: Callable[[np.ndarray], np.ndarray],
        *,
        seed: int,
        batch: int,
        num_batches: int,
    ) -> None:
        self._locate = locate
        self._lengths = lengths
        self._seed = seed
        self._batch = batch
        self._num_batches = num_batches
        # Cache of the last window: a reader asks for its positions one batch at a time.
        self._window: tuple[int, np.ndarray, np.ndarray] | None = None

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, sample), int64 [n] each, at stream positions [n]."""
        positions = np.asarray(positions, np.int64)
        windows, inside = np.divmod(positions, self._batch * self._num_batches)
        epochs, samples = np.empty_like(positions), np.empty_like(positions)
        for window in np.unique(windows).tolist():
            here = windows == window
            sorted_epochs, sorted_samples = self._sorted(window)
            epochs[here] = sorted_epochs[inside[here]]
            samples[here] = sorted_samples[inside[here]]
        return epochs, samples

    def _sorted(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        if self._window is None or self._window[0] != window:
            size = self._batch * self._num_batches
            epochs, samples = self._locate(np.arange(window * size, (window + 1) * size))
            # A stable sort keeps the underlying order among samples of equal length.
            by_length = np.argsort(self._lengths(samples), kind="stable")
            # Sorted batches are shuffled, so that lengths do not grow over the window.
            batches = permuted_index(
                self._seed ^ _LENGTHS, window, np.arange(self._num_batches), self._num_batches
            )
            by_length = by_length.reshape(self._num_batches, self._batch)[batches].reshape(-1)
            self._window = window, epochs[by_length], samples[by_length]
        return self._window[1:]
