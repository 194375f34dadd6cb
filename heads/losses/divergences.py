"""Cauchy-Schwarz divergences and Tanimoto losses of paper 002, on softmax or sigmoid outputs.

Norms are kept as logarithms: p_y = exp(z_y - logsumexp z) and log ||p||^2 = logsumexp(2z) -
2 logsumexp(z), so that no square underflows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.losses.base import Block, Loss, Reduction, Rows, Stats, logsumexp


class SigmoidLoss(Loss):
    """A loss of z_y and the norm of sigmoid(z) over all classes."""

    statistic = "log sum sigmoid(z)^2, z_y"
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(2 * F.logsigmoid(logits_BC)), block.true


@dataclass(frozen=True)
class SoftmaxCauchySchwarz(Loss):
    """-log(p_y / ||p||) = logsumexp(2z) / 2 - z_y, the mean over rows (002, eq 4)."""

    kind = "softmax_cs"
    paper = "002 eq 4"
    statistic = "logsumexp 2z, z_y"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(2 * logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(squares / 2 - true)


@dataclass(frozen=True)
class SigmoidCauchySchwarz(SigmoidLoss):
    """-log(sigmoid(z_y) / ||sigmoid(z)||), the mean over rows (002, eq 5)."""

    kind = "sigmoid_cs"
    paper = "002 eq 5"
    aligned = False

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(squares / 2 - F.logsigmoid(true))


@dataclass(frozen=True)
class SoftmaxTanimoto(Loss):
    """-p_y / (1 + ||p|| - p_y), the mean over rows; its infimum is -1 (002, eq 7)."""

    kind = "softmax_tanimoto"
    paper = "002 eq 7"
    statistic = "logsumexp z, logsumexp 2z, z_y"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.LOGSUMEXP, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), logsumexp(2 * logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, squares, true = total
        return rows.mean(_tanimoto((true - lse).exp(), (squares / 2 - lse).exp()))


@dataclass(frozen=True)
class SigmoidTanimoto(SigmoidLoss):
    """-s_y / (1 + ||s|| - s_y) with s = sigmoid(z), the mean over rows (002, eq 9)."""

    kind = "sigmoid_tanimoto"
    paper = "002 eq 9"
    aligned = True

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(_tanimoto(torch.sigmoid(true), (squares / 2).exp()))


def _tanimoto(true: Tensor, norm: Tensor) -> Tensor:
    return -true / (1 + norm - true)
