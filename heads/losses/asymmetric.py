"""Binary cross-entropy that gives less weight to easy classes: focal and asymmetric losses."""

import math
from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import STRICT, Block, Loss, Reduction, Rows, Stats
from heads.losses.binary_cross_entropy import softplus


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
        return self._of_negative(logits_BC).sum(1), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, true = total
        # Powers of 1 - p and p as exponentials, whose derivatives exist where they underflow.
        positive = (-self.gamma_positive * softplus(true)).exp() * softplus(-true)
        return rows.mean(every + rows.over_labels(positive - self._of_negative(true)))

    def initial_bias(self, num_classes: int) -> float:
        """Return the logit of 1/K, as `bce`."""
        return -math.log(max(num_classes - 1, 1))

    def _of_negative(self, z: Tensor) -> Tensor:
        """Return the terms of logits of negatives."""
        if not self.margin:
            return (-self.gamma_negative * softplus(-z)).exp() * softplus(z)
        q = torch.relu(torch.sigmoid(z) - self.margin)
        return q**self.gamma_negative * -torch.log1p(-q)
