"""The first random numbers of many samples at once, equal to those of their generators.

`SampleGenerator` (`data/augment/base.py`) is one numpy generator that is reseeded for every sample.
For a small image, reseeding it and drawing a few numbers takes a quarter of the time of decoding.
This module computes the first blocks of Philox4x64-10 (Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3") for all samples of a batch, and converts their words as numpy's
Generator does.
"""

import numpy as np

_ROUNDS = 10
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
# The key increases by this in each round: uint64 [rounds, 2].
_KEY_STEPS = np.outer(
    np.arange(_ROUNDS, dtype=np.uint64),
    np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64),
)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_FACTORS_LOW, _FACTORS_HIGH = _FACTORS & _LOW, _FACTORS >> _HALF


def first_words(
    key: tuple[int, int], epochs: np.ndarray, indices: np.ndarray, *, blocks: int = 1
) -> np.ndarray:
    """Return the first words that the generator of each sample yields, uint64 [4 * blocks, n].

    key: the seed and the stream. epochs, indices: int64 [n] each.
    """
    even, odd = np.empty((2, 2, blocks, len(indices)), np.uint64)
    # Word 0 of the counter counts blocks. numpy increments it before it computes a block.
    even[0] = np.arange(1, blocks + 1)[:, None]
    odd[0], even[1], odd[1] = indices, epochs, 0
    even, odd = even.reshape(2, -1), odd.reshape(2, -1)
    for keys in (np.array(key, np.uint64) + _KEY_STEPS)[:, :, None]:
        high, low = _multiplied(even)
        # The product of word 0 goes to words 3 and 2, and that of word 2 to words 1 and 0.
        odd ^= keys
        odd ^= high[::-1]
        even, odd = odd, low[::-1]
    words = np.stack([even[0], odd[0], even[1], odd[1]])
    return words.reshape(4, blocks, -1).swapaxes(0, 1).reshape(4 * blocks, -1)


def _multiplied(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper and lower 64 bits of the products of `words`, uint64 [2, n], and the
    factors.
    """
    low, high = words & _LOW, words >> _HALF
    # None of these sums exceeds 64 bits.
    middle = low * _FACTORS_LOW
    middle >>= _HALF
    middle += high * _FACTORS_LOW
    low *= _FACTORS_HIGH
    low += middle & _LOW
    high *= _FACTORS_HIGH
    high += middle >> _HALF
    high += low >> _HALF
    return high, words * _FACTORS


def as_doubles(words: np.ndarray) -> np.ndarray:
    """Return the numbers that `Generator.random` makes of `words` (uint64 [n]), float64 [n]."""
    return (words >> np.uint64(11)) * 2.0**-53


def as_integers(words: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers that `Generator.integers(end, size=2)` makes of `words` (uint64 [n]),
    int64 [2, n], and whether they are valid, bool [n].

    0 < end < 2^32. Where the result is not valid, the generator may draw again (Lemire 2019, "Fast
    Random Integer Generation in an Interval"). This affects one sample in 2^31 / `end`.
    """
    products = np.stack([words & _LOW, words >> _HALF]) * np.uint64(end)
    valid = ((products & _LOW) >= np.uint64(end)).all(axis=0)
    return (products >> _HALF).astype(np.int64), np.asarray(valid)


def as_integer(half: int, end: int) -> int | None:
    """Return the number that `Generator.integers(end)` makes of half a word, or None if it may draw
    again or, for 1, draws nothing. 0 < end < 2^32.
    """
    product = half * end
    return product >> 32 if end > 1 and product & 0xFFFFFFFF >= end else None
