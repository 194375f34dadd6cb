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
from heads.weights import ClassWeights

# The constants of splitmix64 (Steele, Lea, Flood 2014) as int64. Integer products and sums of torch
# wrap around, so they have the same bits as those of uint64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def initial_rows(
    weights: ClassWeights,
    dim: int,
    *,
    seed: int,
    std: float,
    first_class: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the initial rows [n, dim] of this rank's nodes, on the device of `weights`.

    They are normally distributed for leaves whose class is at least `first_class`, and zero for all
    other nodes.
    """
    tree, device = weights.tree, weights.device
    rows = torch.zeros(weights.num_held, dim, dtype=dtype, device=device)
    if not std:
        return rows
    at_once = _rows_at_once(dim, device)
    for start in range(weights.start, weights.stop, at_once):
        nodes = slice(start, min(start + at_once, weights.stop))
        classes = tree.class_of_node[nodes]
        leaves = np.flatnonzero((classes >= first_class) & ~tree.has_children[nodes])
        drawn = normal_rows(torch.from_numpy(classes[leaves]).to(device), dim, seed=seed, std=std)
        positions = torch.from_numpy(leaves + (start - weights.start)).to(device)
        rows.index_copy_(0, positions, drawn.to(dtype))
    return rows


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
    gives the radius, the lower half the angle. `_mix` is a bijection, so two classes never have the
    same hashes.
    """
    columns = torch.arange(1, dim + 1, device=classes.device) * _GOLDEN
    of_seed = _mix(torch.full((1,), seed, device=classes.device) + _GOLDEN)
    of_class = _mix(of_seed + classes * _GOLDEN)
    bits = _mix(of_class.unsqueeze(1) + columns)
    radius = _shifted(bits, 32).double().add_(0.5).mul_(2**-32).log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_(0xFFFFFFFF).double().mul_(2 * math.pi / 2**32)
    return radius.mul_(std).mul_(angle.cos_()).float()


def _rows_at_once(dim: int, device: torch.device) -> int:
    """Return the number of rows in a block: 2 MiB of float64 per temporary on a CPU, which stays in
    its caches, and 32 MiB on a GPU, where running a kernel should take longer than launching it."""
    numbers = 1 << 18 if device.type == "cpu" else 1 << 22
    return max(1, numbers // dim)


def _mix(bits: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 in place."""
    for shift, factor in _MIX:
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift int64 to the right by `by` bits, with zeros on the left as for uint64."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
