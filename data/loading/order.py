"""The global order of samples, a pure function of (seed, epoch), and each rank's share of it.

Training reads an endless stream of positions 0, 1, 2, ... With N samples, position p belongs to
epoch p // N, and its sample is element p % N of a permutation that (seed, epoch) selects. The
permutation is a cipher, not a shuffled list: it computes a single element without computing the
others. This gives three properties:

- Resuming is exact and immediate. The number of samples consumed is the complete state of the
  order; nothing is replayed.
- All ranks and workers agree on the order without communication, however many there are. They use
  `share` to divide the positions of a global batch among themselves.
- Memory use does not grow with the number of samples.

Example: N = 10 and a global batch of 4. With seed 0, epoch 0 is 4 6 8 9 0 2 5 7 3 1 and epoch 1 is
9 0 1 5 2 6 4 7 8 3. The third batch consists of positions 8 to 11: samples 3 and 1 end epoch 0, and
samples 9 and 0 begin epoch 1. A single rank reads all four samples. With three ranks, the first
reads sample 3, the second reads sample 1 and the third reads samples 9 and 0. A run that resumes
after 8 samples begins with this batch, regardless of its number of ranks.

`ByLength` sorts windows of an order by length to reduce padding. `data/loading/sampling.py` defines
the order in which some classes or shard sets are sampled more often than others.
`data/loading/loader.py` assigns samples to ranks.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

Number = TypeVar("Number", int, np.ndarray)

_ROUNDS = 8
_MASK = (1 << 64) - 1
# Up to 67,108,864 samples, the tables of an epoch take at most 512 KiB.
_MAX_TABLE_BITS = 13
# The constants of `_mix`.
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# Maps stream positions, int64 [n], to their passes and sample indices, int64 [n] each. A pass
# counts the earlier occurrences of a sample, so every (pass, sample) occurs once in the stream. In
# an `Order`, it is the epoch.
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_GROUPS = 0x67727073  # "grps": keeps permutations within groups independent of `Order`
_LENGTHS = 0x6C656E67  # "leng": keeps the order of sorted batches independent of `Order`


def permuted_index(
    seed: int, epoch: int, position: np.ndarray, num_samples: int, *, part: int | None = None
) -> np.ndarray:
    """Return the sample indices at `position` (int64 [...]) of an epoch's order.

    Every position must be in [0, num_samples). part: selects one of several independent orders of
    the same epoch. For each (seed, epoch, part), the result is a bijection of [0, num_samples): a
    Feistel network over the next power of four, applied repeatedly until the value is below
    `num_samples` (cycle walking; Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    The expected number of applications is below four, because the power of four is less than four
    times `num_samples`.
    """
    assert ((position >= 0) & (position < num_samples)).all()
    half = max(1, -(-(num_samples - 1).bit_length() // 2))
    permute = _tabulated if half <= _MAX_TABLE_BITS else _keyed
    value = permute(position.reshape(-1), half, seed, epoch, part)
    # The network permutes [0, 4**half), which is larger than the epoch. Applying it again to values
    # outside the epoch follows their cycle in the permutation. Every cycle returns to its start,
    # which is inside the epoch, so the walk ends. Two positions cannot reach the same sample,
    # because every value has exactly one predecessor. The result is therefore also a bijection.
    while len(walking := np.flatnonzero(value >= num_samples)):
        value[walking] = permute(value[walking], half, seed, epoch, part)
    return value.reshape(position.shape)


def _keyed(value: np.ndarray, half: int, seed: int, epoch: int, part: int | None) -> np.ndarray:
    """Permute `value`, int64 [...] below 4**half."""
    keys = _round_keys(seed, epoch, part)
    return _feistel(value.astype(np.uint64), np.uint64(half), keys).astype(np.int64)


def _tabulated(value: np.ndarray, half: int, seed: int, epoch: int, part: int | None) -> np.ndarray:
    """Like `_keyed`, but with tables, which takes a fifth of the time for a batch."""
    left, right = value >> half, value & ((1 << half) - 1)
    for table in _round_tables(half, seed, epoch, part):
        left, right = right, left ^ table[right]
    permuted: np.ndarray = (left << half) | right
    return permuted


@lru_cache(maxsize=8)
def _round_tables(half: int, seed: int, epoch: int, part: int | None) -> list[np.ndarray]:
    """Return f(right) of `_feistel` for each round and every `right`, int64 [2**half] each."""
    right, mask = np.arange(1 << half, dtype=np.uint64), np.uint64((1 << half) - 1)
    keys = _round_keys(seed, epoch, part)
    return [(_mix(right + np.uint64(key)) & mask).astype(np.int64) for key in keys]


def permuted_in_groups(
    seed: int, group: np.ndarray, epoch: np.ndarray, position: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """Return the index within its group at each `position`, int64 [n].

    Like `permuted_index`, with a separate permutation for every element: (seed, group, epoch)
    selects a bijection of [0, size). All arguments except `seed` are int64 [n], with
    0 <= position < size. A batch may contain as many groups as samples, so this function computes
    the permutations of all groups together.
    """
    bits = np.frexp((size - 1).astype(np.float64))[1]
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    words = [np.uint64(key) for key in _round_keys(seed, 0, _GROUPS)]
    keyed = _mix(_mix(group.astype(np.uint64) + words[0]) + epoch.astype(np.uint64))
    keys = [_mix(keyed + word) for word in words]
    value = _feistel(position.astype(np.uint64), half, keys)
    end = size.astype(np.uint64)
    while len(walking := np.flatnonzero(value >= end)):  # cycle walking, as in `permuted_index`
        there = [key[walking] for key in keys]
        value[walking] = _feistel(value[walking], half[walking], there)
    return value.astype(np.int64)


def _feistel(
    value: np.ndarray, half: np.uint64 | np.ndarray, keys: Sequence[int | np.ndarray]
) -> np.ndarray:
    """Permute [0, 4**half), keyed by `keys`. `half` and the keys may be arrays.

    A round maps (left, right) to (right, left ^ f(right)), which can be inverted for any f: `right`
    is in the output, so f(right) is known and the xor can be undone. `_mix` therefore need not be
    invertible; it only has to scramble bits well.
    """
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << half) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014). uint64 arithmetic wraps
    around.
    """
    # Batches are small, so creating scalars and arrays would take most of the time. Use constants
    # and operations in place.
    value = value ^ (value >> _SHIFTS[0])
    value *= _FACTORS[0]
    value ^= value >> _SHIFTS[1]
    value *= _FACTORS[1]
    value ^= value >> _SHIFTS[2]
    return value


def _round_keys(seed: int, epoch: int, part: int | None) -> list[int]:
    spawn_key = () if part is None else (part,)
    # Give each word a fixed index. SeedSequence splits a large seed into two words, and the upper
    # word would otherwise occupy the index of the epoch.
    words = [seed & 0xFFFFFFFF, epoch, seed >> 32]
    sequence = np.random.SeedSequence(words, spawn_key=spawn_key)
    state = sequence.generate_state(_ROUNDS, np.uint64)
    return [int(key) & _MASK for key in state]


class _Epoch(NamedTuple):
    """The shards of an epoch, in the order in which they are read.

    shards: the shards, int64 [S]. starts: the number of samples before each shard, int64 [S + 1].
    groups: the first sample of each group, int64 [G + 1].
    """

    shards: np.ndarray
    starts: np.ndarray
    groups: np.ndarray


class Order:
    """Maps each position of the endless stream of epochs to a sample.

    If `shuffle_shards` is None, every epoch is one permutation of all samples. If it is N, an epoch
    permutes the shards, divides them into groups of nearly equal size, with at most N shards each,
    and permutes the samples in each group. Consecutive reads then access one group, or two at a
    boundary, so a cache has to store only the shards of these groups. An order stores only a few
    numbers per shard.

    Example: four shards of 3 samples, shuffle_shards = 2, seed 0. Epoch 0 visits shards 2 1 | 0 3.
    Its first six samples, 3 8 6 7 5 4, come from shards 2 and 1 (samples 6 to 8 and 3 to 5). The
    other six, 2 9 10 1 11 0, come from shards 0 and 3.
    """

    def __init__(
        self, seed: int, shard_sizes: Sequence[int], shuffle_shards: int | None = None
    ) -> None:
        """shard_sizes: the number of samples in each shard, in the order of the split. Each must be
        positive.
        """
        self.seed = seed
        self.num_samples = sum(shard_sizes)
        num_shards = len(shard_sizes)
        self.num_groups = 1 if shuffle_shards is None else -(-num_shards // shuffle_shards)
        self.is_global = shuffle_shards is None
        self._sizes = np.asarray(shard_sizes, dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        # Group g consists of the shards [bounds[g], bounds[g + 1]) in the order of the epoch.
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
            # Group `number` covers the positions [first, end) of the epoch, which are permuted
            # among themselves.
            here, (first, end) = numbers == number, groups[number : number + 2].tolist()
            permuted[here] = first + permuted_index(
                self.seed, epoch, positions[here] - first, end - first, part=number
            )
        # A permuted position counts the samples of all shards in the order of the epoch. Find its
        # shard, and then add the offset within that shard to the index of the shard's first sample.
        visit = np.searchsorted(starts, permuted, side="right") - 1
        indices: np.ndarray = self._first[shards[visit]] + permuted - starts[visit]
        return indices

    def _epoch(self, number: int) -> _Epoch:
        """Return an epoch. Two epochs are cached, because a batch may cross the boundary between
        them.
        """
        if number not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            # Groups use parts 0 to num_groups - 1, so the shards use the next number.
            shards = permuted_index(
                self.seed,
                number,
                np.arange(len(self._sizes)),
                len(self._sizes),
                part=self.num_groups,
            )
            starts = np.concatenate([[0], np.cumsum(self._sizes[shards])])
            self._epochs[number] = _Epoch(shards, starts, starts[self._bounds])
        return self._epochs[number]


def share(count: int, rank: int, world_size: int) -> range:
    """Return the part of `count` items for `rank`.

    The sizes of the parts differ by at most one item, and parts may be empty. Raises ValueError if
    `rank` is outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is out of range for world size {world_size}")
    return range(count * rank // world_size, count * (rank + 1) // world_size)


class ByLength:
    """An order in which windows of about `num_batches` batches are sorted by length.

    Windows consist of whole batches, except that each epoch begins and ends its own: a window only
    exchanges samples of one epoch, so an epoch contains the same samples as before. A window is a
    fixed range of the stream, so this order is also a function of the position alone and can be
    resumed in the middle of a window.

    locate: the underlying order. lengths: a function from samples, int64 [n], to their lengths [n].
    epoch: the number of samples per epoch. batch: the size of a global batch.

    Example: epochs of 10 samples, batches of 4, windows of 2 batches. The windows of epoch 0 are
    the positions 0 to 7 and 8 to 9. Those of epoch 1 are 10 to 15 and 16 to 19. The batch of the
    positions 8 to 11 belongs to two epochs, so its texts come from two windows.
    """

    def __init__(
        self,
        locate: Locate,
        lengths: Callable[[np.ndarray], np.ndarray],
        *,
        seed: int,
        epoch: int,
        batch: int,
        num_batches: int,
    ) -> None:
        self._locate = locate
        self._lengths = lengths
        self._seed = seed
        self._epoch = epoch
        self._batch = batch
        self._window = batch * num_batches
        # Cache the last window, because a reader requests one batch at a time.
        self._sorted_window: tuple[tuple[int, int], np.ndarray, np.ndarray] | None = None

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (pass, sample), int64 [n] each, at stream positions [n]."""
        positions = np.asarray(positions, np.int64)
        epochs = positions // self._epoch
        windows = (positions - self._first_batch(epochs)) // self._window
        passes, samples = np.empty_like(positions), np.empty_like(positions)
        # For the rows of a batch, a set takes a tenth of the time of `np.unique`.
        for epoch, window in sorted(set(zip(epochs.tolist(), windows.tolist(), strict=True))):
            here = (epochs == epoch) & (windows == window)
            start, sorted_passes, sorted_samples = self._sorted(epoch, window)
            passes[here] = sorted_passes[positions[here] - start]
            samples[here] = sorted_samples[positions[here] - start]
        return passes, samples

    def _first_batch(self, epoch: Number) -> Number:
        """Return the first position of the batch in which an epoch begins."""
        return epoch * self._epoch // self._batch * self._batch

    def _sorted(self, epoch: int, window: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the first position of a window, and the passes and samples at its positions."""
        first = self._first_batch(epoch) + window * self._window
        start = max(epoch * self._epoch, first)
        if self._sorted_window is None or self._sorted_window[0] != (epoch, window):
            positions = np.arange(start, min((epoch + 1) * self._epoch, first + self._window))
            passes, samples = self._locate(positions)
            # A stable sort preserves the underlying order among samples of equal length.
            by_length = np.argsort(self._lengths(samples), kind="stable")
            # Shuffle the batches, so that lengths do not increase over the window. The first and
            # the last batch may be incomplete.
            batches = positions // self._batch - start // self._batch
            num = int(batches[-1]) + 1
            shuffled = permuted_index(
                self._seed ^ _LENGTHS, epoch, np.arange(num), num, part=window
            )
            target = np.argsort(shuffled[batches], kind="stable")
            passes[target], samples[target] = passes[by_length], samples[by_length]
            self._sorted_window = (epoch, window), passes, samples
        return start, *self._sorted_window[1:]
