"""What a loss contributes to the kernels in `heads/tiles`: a few lines per tile of logits.

A tile is a rectangle of logits, rows of the batch by classes, that a kernel keeps in registers. The
statistics of a loss are sums or logsumexps of functions of a logit, its terms. The kernel for the
forward pass reduces the terms of each row. The kernel for the backward pass needs the derivatives
of the terms, their slopes. For example, the term of `softmax_cs` is 2z, its slope is 2, and its
reduction is a logsumexp.

Neither kernel includes the logits of the labels: their terms are added by torch operations, in
float32 and with the margins of the logit map.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from heads.optional_triton import jit, tl


class Reduction(Enum):
    """How a statistic [B, ...] is merged over disjoint blocks of classes."""

    SUM = "sum"
    LOGSUMEXP = "logsumexp"


@dataclass(frozen=True)
class Tile:
    """The terms of a loss, for the kernels: all of its statistics but the last one, z_y.

    `terms(z)` returns a tuple with one tile per reduction, and `slopes(z)` the derivatives of these
    terms with respect to `z`, a float32 tile. Both functions are compiled by Triton.

    `narrow` selects tiles of half the width, for terms that need so many registers that the
    compiler would spill some of them to memory.
    """

    terms: Any
    slopes: Any
    reductions: tuple[Reduction, ...]
    narrow: bool = False


@jit
def one(z):
    """Return a tile of ones with the shape of z."""
    return tl.full(z.shape, 1.0, tl.float32)


@jit
def tile_sigmoid(z):
    """Return 1 / (1 + exp(-z)), without overflow."""
    power = tl.exp(-tl.abs(z))
    return tl.where(z < 0, power, 1.0) / (1.0 + power)


@jit
def tile_softplus(z):
    """Return log(1 + exp(z)), accurate for very negative z too.

    log(1 + p) of a small p is computed as p log(u) / (u - 1) with the rounded u = 1 + p (Kahan), so
    that the sum of a million terms of 1e-9 is not lost.
    """
    power = tl.exp(-tl.abs(z))
    rounded = 1.0 + power
    excess = rounded - 1.0
    log1p = tl.where(
        excess == 0.0, power, tl.log(rounded) * (power / tl.where(excess == 0.0, 1.0, excess))
    )
    return tl.maximum(z, 0.0) + log1p


@jit
def _logit(z):
    return (z,)


@jit
def _slope_of_logit(z):
    return (one(z),)


LOGSUMEXP = Tile(_logit, _slope_of_logit, (Reduction.LOGSUMEXP,))
