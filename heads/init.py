"""Initial rows that depend on (seed, row, column) only, so that no world size changes them."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 1 << 14


def normal_rows(rows: NDArray[np.int64], dim: int, *, seed: int, std: float) -> NDArray[np.float32]:
    """Normal deviates [len(rows), dim]: a hash of (seed, row, column) through Box and Muller."""
    columns = np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
    start = _mix(np.array([seed], dtype=np.uint64) + _GOLDEN)
    result = np.empty((len(rows), dim), dtype=np.float32)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        ids = rows[begin : begin + _ROWS_AT_ONCE].astype(np.uint64)
        bits = _mix(_mix(start + ids * _GOLDEN)[:, None] + columns)
        radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)) + 0.5) / 2**32))
        angle = 2 * np.pi * ((bits & np.uint64(0xFFFFFFFF)) / 2**32)
        result[begin : begin + len(ids)] = std * radius * np.cos(angle)
    return result


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
