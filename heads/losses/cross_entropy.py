"""Cross-entropy and its batch version, which share their statistics and differ in `value`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from heads.losses.base import Block, Loss, Rows, Stats, logsumexp


class CrossEntropy(Loss):
    """-log p_y = logsumexp(z) - z_y, the mean over rows (002, eq 1)."""

    kind = "ce"
    paper = "002 eq 1"
    statistic = "logsumexp z, z_y"
    aligned = False

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), block.pick(logits_BC)

    def merge(self, parts: Sequence[Stats]) -> Stats:
        lse, true = zip(*parts, strict=True)
        return logsumexp(torch.stack(lse, dim=1)), torch.stack(true).sum(0)

    def identity(self, like: Tensor) -> Stats:
        return torch.full_like(like, -torch.inf), torch.zeros_like(like)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, true = total
        return (lse - true).mean()


class BatchCrossEntropy(CrossEntropy):
    """KL(P_B || Q_B) with one softmax over the whole batch (002, definition 2).

    P_B puts 1/m on each row's label, so the loss is logsumexp over rows and classes of z, less
    the mean of z_y, less log m.
    """

    kind = "batch_ce"
    paper = "002 def 2"
    statistic = "logsumexp z, z_y (one Z for the batch)"
    aligned = True
    couples_rows = True

    def value(self, total: Stats, rows: Rows) -> Tensor:
        if rows.num_rows < 2:
            raise ValueError(
                "batch_ce needs a global batch of at least 2 rows, got "
                f"{rows.num_rows}: raise train.global_batch"
            )
        lse, true = total
        return logsumexp(lse.unsqueeze(0)).squeeze(0) - true.mean() - math.log(rows.num_rows)
