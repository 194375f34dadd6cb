"""Initial values of a head.

They depend only on (seed, class, column), so they are the same for every world size.
"""

import numpy as np
from numpy.typing import NDArray

from heads.losses import Loss
from heads.weights import ClassWeights

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE = 1 << 14


def initial_rows(
    weights: ClassWeights, dim: int, *, seed: int, std: float, first_class: int = 0
) -> NDArray[np.float32]:
    """Return the initial rows [n, dim] of this rank's nodes.

    They are normally distributed for leaves whose class is at least `first_class`, and zero for all
    other nodes.
    """
    tree, nodes = weights.tree, np.arange(weights.start, weights.stop)
    classes = tree.class_of_node[nodes]
    leaves = np.flatnonzero((classes >= first_class) & ~tree.has_children[nodes])
    rows = np.zeros((len(nodes), dim), dtype=np.float32)
    rows[leaves] = normal_rows(classes[leaves], dim, seed=seed, std=std)
    return rows


def initial_bias(weights: ClassWeights, loss: Loss, *, first_class: int = 0) -> NDArray[np.float32]:
    """Return the initial bias [n] of this rank's nodes.

    It is the loss's initial value at roots and zero at all other nodes, so that the value occurs
    once in the path sum of every class. Roots whose class is below `first_class` are also zero.
    """
    tree, nodes = weights.tree, np.arange(weights.start, weights.stop)
    roots = tree.parent[nodes] < 0
    if first_class:
        roots &= tree.class_of_node[nodes] >= first_class
    return np.where(roots, loss.initial_bias(tree.num_classes), 0).astype(np.float32)


def normal_rows(rows: NDArray[np.int64], dim: int, *, seed: int, std: float) -> NDArray[np.float32]:
    """Return normal deviates [len(rows), dim]: the Box-Muller transform of hashes of (seed, row,
    column)."""
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
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
