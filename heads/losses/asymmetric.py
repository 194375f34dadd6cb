"""Binary cross-entropy that gives less weight to easy classes: focal and asymmetric losses."""

import math
from itertools import repeat
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import STRICT, Block, Loss, Reduction, Rows, Stats
from heads.losses.binary_cross_entropy import softplus

# The number of logits that a CPU processes at a time.
_ELEMENTS = 1 << 18


@dataclass(frozen=True, config=STRICT)
class Asymmetric(Loss):
    """-(1 - p_y)^g log p_y - sum over j != y of q_j^h log(1 - q_j), averaged over rows.

    This is the asymmetric loss of Ridnik et al. 2021, with `gamma_positive` g, `gamma_negative` h,
    p = sigmoid(z) and q = max(p - margin, 0). With label sets, the first term is summed over the
    labels of a row. With equal gammas and no margin, this is the focal loss (Lin et al. 2017), and
    with gammas of 0 it is `bce`.

    Aligned: near the infimum 0, every p_y is near 1, and every false p is at most a little above
    the margin.
    """

    kind: Literal["asymmetric"] = Field(default="asymmetric", kw_only=True, repr=False)
    gamma_positive: float = Field(default=0.0, ge=0, description="exponent of 1 - p of a label")
    gamma_negative: float = Field(default=4.0, ge=0, description="exponent of p of a negative")
    margin: float = Field(
        default=0.05, ge=0, le=0.5, description="probability below which a negative has no loss"
    )

    paper = "Ridnik et al. 2021"
    statistic = "sum over all classes of the term of a negative, z_y"
    aligned = True
    label_sets = "rows"
    reductions = (Reduction.SUM, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return self._of_negatives(logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, true = total
        # A power of 1 - p as an exponential, whose derivative exists where it underflows.
        positive = (-self.gamma_positive * softplus(true)).exp() * softplus(-true)
        return rows.mean(every + rows.over_labels(positive - self._of_negatives(true.unsqueeze(1))))

    def initial_bias(self, num_classes: int) -> float:
        """Return the logit of 1/K, as `bce`."""
        return -math.log(max(num_classes - 1, 1))

    def _of_negatives(self, z: Tensor) -> Tensor:
        """Return the terms of logits of negatives, summed over dim 1."""
        sums: Tensor = _SumOfNegatives.apply(z, self.gamma_negative, self.margin)
        return sums


class _SumOfNegatives(torch.autograd.Function):
    """The sum of -q^h log(1 - q) over dim 1, with q = max(p - margin, 0) and p = sigmoid(z).

    Forward saves the derivatives of the terms: one matrix, whereas autograd would save one for each
    operation. On a CPU, it computes a few rows at a time, so that their temporaries stay in the
    cache.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, exponent: float, margin: float) -> Tensor:
        slopes = torch.empty_like(z) if ctx.needs_input_grad[0] else None
        num_rows = max(1, _ELEMENTS // z.shape[1] if z.is_cpu else len(z))
        into = repeat(None) if slopes is None else slopes.split(num_rows)
        pieces = zip(z.split(num_rows), into, strict=False)  # `into` may be infinite
        sums = torch.cat([_negatives(rows, exponent, margin, slope) for rows, slope in pieces])
        if slopes is not None:
            ctx.save_for_backward(slopes)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad.unsqueeze(1), None, None


def _negatives(z: Tensor, exponent: float, margin: float, slope: Tensor | None) -> Tensor:
    """Return the sums over dim 1 of the terms of logits of negatives, and write their derivatives
    to `slope`.

    The derivative is q^h p ((1 - p) / (1 - q) - h (1 - p) log(1 - q) / q), or 0 where p is below
    the margin.
    """
    p = torch.sigmoid(z)
    q = torch.relu(p - margin)
    log = torch.neg(q).log1p_() if margin else softplus(z).neg_()
    # torch computes a power of 0, 0.5, 1, 2 or 3 many times faster than any other.
    power = (q ** (exponent / 2)).square_()
    sums = (power * log).sum(1).neg_()
    if slope is not None:
        rest = 1 - p  # 1 - q is rest + margin
        slope.copy_(rest / (rest + margin) if margin else torch.ones_like(p))
        q.clamp_(min=torch.finfo(q.dtype).tiny)  # where q is 0, the quotient is 0 instead of NaN
        slope.addcdiv_(log.mul_(rest), q, value=-exponent).mul_(p).mul_(power)
        if exponent == 0:  # the power is 1 where q is 0
            slope.masked_fill_(p <= margin, 0)
    return sums
