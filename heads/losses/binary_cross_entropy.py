"""Binary cross-entropy: every class is a question of its own."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.losses.base import Block, Loss, Rows, Stats


class BinaryCrossEntropy(Loss):
    """-log sigmoid(z_y) - sum over j != y of log(1 - sigmoid(z_j)), the mean over rows.

    002, section 4.3; the sign of its second term is a slip in print. As softplus(z) - z =
    softplus(-z), the loss is the sum of softplus(z) over all classes less z_y.
    """

    kind = "bce"
    paper = "002 section 4.3"
    statistic = "sum softplus z, z_y"
    aligned = True

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        # Above 50, softplus(z) - z is below float64's last bit: the default of 20 is not.
        return F.softplus(logits_BC, threshold=50).sum(1), block.pick(logits_BC)

    def merge(self, parts: Sequence[Stats]) -> Stats:
        softplus, true = zip(*parts, strict=True)
        return torch.stack(softplus).sum(0), torch.stack(true).sum(0)

    def identity(self, like: Tensor) -> Stats:
        return torch.zeros_like(like), torch.zeros_like(like)

    def initial_bias(self, num_classes: int) -> float:
        """The logit of 1/K: from 0, K - 1 false classes a row drown the true one's gradient."""
        return -math.log(max(num_classes - 1, 1))

    def value(self, total: Stats, rows: Rows) -> Tensor:
        softplus, true = total
        return (softplus - true).mean()
