"""The global order of samples: a pure function of (seed, epoch), and how ranks share it.

An order is a keyed permutation, never a list, so that any position of any epoch costs the same and
nothing needs to be stored or replayed. What is read, and by whom, is `data/loader.py`.
"""

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1


def permuted_index(seed: int, epoch: int, position: np.ndarray, num_samples: int) -> np.ndarray:
    """Sample indices at `position` (int64 [...], each in [0, num_samples)) of an epoch's order.

    A bijection of [0, num_samples) for each (seed, epoch): a Feistel network on the next power of
    four, walked until it falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains", cycle walking). The expected number of walks is below four.
    """
    position = np.asarray(position)
    if len(outside := position[(position < 0) | (position >= num_samples)]):
        raise ValueError(f"position {outside[0]} is not in an epoch of {num_samples} samples")
    half = np.uint64(max(1, -(-(num_samples - 1).bit_length() // 2)))
    keys = _round_keys(seed, epoch)
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
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014); uint64 wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    return [int(key) & _MASK for key in state]


def locate(seed: int, positions: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(epoch, sample index), int64 [...], of positions in the endless stream of epochs."""
    epochs, inside = np.divmod(np.asarray(positions, dtype=np.int64), num_samples)
    indices = np.empty_like(inside)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permuted_index(seed, int(epoch), inside[here], num_samples)
    return epochs, indices


def share(count: int, rank: int, world_size: int) -> range:
    """The part of `count` things in a row that `rank` takes; parts differ by one, or are empty."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)
