"""The first random numbers of many samples at once, equal to those of their generators.

`SampleGenerator` (`data/augment/base.py`) is one numpy generator that is reseeded for every sample.
For a small image, reseeding it and drawing a few numbers takes a quarter of the time of decoding.
This module computes the first block of Philox4x64-10 (Salmon et al. 2011, "Parallel Random Numbers:
As Easy as 1, 2, 3") for all samples of a batch, and converts its words as numpy's Generator does.
"""

import numpy as np

_ROUNDS = 10
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_FACTORS_LOW, _FACTORS_HIGH = _FACTORS & _LOW, _FACTORS >> _HALF


def first_words(key: tuple[int, int], epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the first four words that the generator of each sample yields, uint64 [4, n].

    key: the seed and the stream. epochs, indices: int64 [n] each.
    """
    # Word 0 of the counter counts blocks. numpy increments it before it computes a block.
    even = np.stack([np.ones_like(indices), epochs]).astype(np.uint64)
    odd = np.stack([indices, np.zeros_like(indices)]).astype(np.uint64)
    for number in range(_ROUNDS):
        keys = [(word + number * step) % 2**64 for word, step in zip(key, _KEY_STEPS, strict=True)]
        high, low = _multiplied(even)
        # The products of words 0 and 2 go to words 3 and 2, and 1 and 0, respectively.
        odd ^= high[::-1]
        even, odd = odd ^ np.array(keys, np.uint64)[:, None], low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _multiplied(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper and lower 64 bits of the products of `words`, uint64 [2, n], and the
    factors.
    """
    low, high = words & _LOW, words >> _HALF
    low_high, high_low = low * _FACTORS_HIGH, high * _FACTORS_LOW
    carry = (low * _FACTORS_LOW >> _HALF) + (low_high & _LOW) + (high_low & _LOW)
    upper = high * _FACTORS_HIGH + (low_high >> _HALF) + (high_low >> _HALF) + (carry >> _HALF)
    return upper, words * _FACTORS


def as_doubles(words: np.ndarray) -> np.ndarray:
    """Return the numbers that `Generator.random` makes of `words` (uint64 [n]), float64 [n]."""
    return (words >> np.uint64(11)) * 2.0**-53


def as_integers(words: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers that `Generator.integers(end, size=2)` makes of `words` (uint64 [n]),
    int64 [2, n], and whether they are valid, bool [n].

    1 < end < 2^32. If the numbers are not valid, the generator would draw again (Lemire 2019, "Fast
    Random Integer Generation in an Interval"). This happens to one sample in 2^31 / `end`.
    """
    products = np.stack([words & _LOW, words >> _HALF]) * np.uint64(end)
    valid: np.ndarray = ((products & _LOW) >= np.uint64(end)).all(axis=0)
    return (products >> _HALF).astype(np.int64), valid
