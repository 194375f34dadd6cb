"""Initial values of a head, computed on its device.

Each number of a leaf's vector is computed from a hash of (seed, class, column), without the state
of a generator. The vector is therefore the same for every world size and on every device, except
that log and cos may differ in the last bits of float64. Rounding to float32 hides this difference
in all but about one of 10^8 numbers.

Rows are generated in blocks, so the memory needed in addition to the rows does not depend on their
number.
"""

import math

import numpy as np
import torch
from torch import Tensor

from heads.losses import Loss
from heads.rows.hashing import hashes, rows_at_once, shifted
from heads.rows.node_values import NodeValues, wide_dtype
from heads.weights import ClassWeights


def initial_rows(
    weights: ClassWeights,
    dim: int,
    *,
    seed: int,
    std: float,
    dtype: torch.dtype = torch.float32,
) -> NodeValues:
    """Return the initial rows [n, dim] of this rank's nodes, on the device of `weights`.

    They are normally distributed for leaves, and zero for inner nodes. A bf16 or fp8 row is the
    float32 row, rounded to the nearest numbers.
    """
    rows = NodeValues.zeros(weights.num_held, dim, dtype, weights.device)
    write_initial_rows(rows, weights, seed=seed, std=std)
    return rows


def write_initial_rows(
    rows: NodeValues, weights: ClassWeights, *, seed: int, std: float, first_class: int = 0
) -> None:
    """Write the initial rows of leaves whose class is at least `first_class`; if `std` is 0, write
    nothing."""
    if not std:
        return
    tree, device = weights.tree, weights.device
    dim = rows.held.shape[1]
    at_once = rows_at_once(dim, device)
    for start in range(weights.start, weights.stop, at_once):
        nodes = slice(start, min(start + at_once, weights.stop))
        classes = tree.class_of_node[nodes]
        leaves = np.flatnonzero((classes >= first_class) & ~tree.has_children[nodes])
        ids = torch.from_numpy(classes[leaves].astype(np.int64)).to(device)
        drawn = normal_rows(ids, dim, seed=seed, std=std)
        positions = torch.from_numpy(leaves + (start - weights.start)).to(device)
        rows.write(positions, drawn.to(wide_dtype(rows.held.dtype)))


def initial_bias(weights: ClassWeights, loss: Loss, *, first_class: int = 0) -> Tensor:
    """Return the initial bias [n] of this rank's nodes, on the device of `weights`.

    It is the loss's initial value at roots and zero at all other nodes, so that the value occurs
    once in the path sum of every class. Roots whose class is below `first_class` are also zero.
    """
    tree, nodes = weights.tree, slice(weights.start, weights.stop)
    roots = tree.parent[nodes] < 0
    if first_class:
        roots &= tree.class_of_node[nodes] >= first_class
    at_roots = torch.from_numpy(roots).to(weights.device)
    return torch.where(at_roots, loss.initial_bias(tree.num_classes), 0.0)


def normal_rows(classes: Tensor, dim: int, *, seed: int, std: float) -> Tensor:
    """Return float32 normal deviates [n, dim] for `classes` [n], int64.

    They are the Box-Muller transform of hashes of (seed, class, column): the upper half of a hash
    gives the radius, the lower half the angle.
    """
    bits = hashes(classes, dim, seed=seed)
    radius = shifted(bits, 32).double().add_(0.5).mul_(2**-32).log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_(0xFFFFFFFF).double().mul_(2 * math.pi / 2**32)
    return radius.mul_(std).mul_(angle.cos_()).float()
