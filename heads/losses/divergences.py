"""Cauchy-Schwarz divergences and Tanimoto losses of paper 002, on softmax or sigmoid outputs.

Norms are computed in log space, so that squares do not underflow: p_y = exp(z_y - logsumexp(z))
and log ||p||^2 = logsumexp(2z) - 2 logsumexp(z).
"""

from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from heads.losses.base import STRICT, Block, Loss, Reduction, Rows, Stats, logsumexp
from heads.losses.tile import Tile, one, tile_sigmoid, tile_softplus
from heads.optional_triton import jit


@jit
def _log_squared_sigmoid(z):
    return (-2.0 * tile_softplus(-z),)


@jit
def _slope_of_log_squared_sigmoid(z):
    return (2.0 * tile_sigmoid(-z),)


@jit
def _twice(z):
    return (2.0 * z,)


@jit
def _slope_of_twice(z):
    return (2.0 * one(z),)


@jit
def _once_and_twice(z):
    return z, 2.0 * z


@jit
def _slope_of_once_and_twice(z):
    return one(z), 2.0 * one(z)


class SigmoidLoss(Loss):
    """A loss that depends on z_y and the norm of sigmoid(z) over all classes."""

    statistic = "log sum sigmoid(z)^2, z_y"
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)
    tile = Tile(
        _log_squared_sigmoid,
        _slope_of_log_squared_sigmoid,
        (Reduction.LOGSUMEXP,),
        narrow=True,
    )

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        log_squares: Tensor = _LogSumSquaredSigmoids.apply(logits_BC)
        return log_squares, block.true


@dataclass(frozen=True, config=STRICT)
class SoftmaxCauchySchwarz(Loss):
    """-log(p_y / ||p||) = logsumexp(2z) / 2 - z_y, averaged over rows (Eq. 4 of paper 002).

    Not aligned: only differences between logits within a row matter (section 3.3 of paper 002).
    """

    kind: Literal["softmax_cs"] = Field(default="softmax_cs", kw_only=True, repr=False)
    paper = "002 eq 4"
    statistic = "logsumexp 2z, z_y"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)
    tile = Tile(_twice, _slope_of_twice, (Reduction.LOGSUMEXP,))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(2 * logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(squares / 2 - true)


@dataclass(frozen=True, config=STRICT)
class SigmoidCauchySchwarz(SigmoidLoss):
    """-log(sigmoid(z_y) / ||sigmoid(z)||), averaged over rows (Eq. 5 of paper 002).

    Not aligned: only ratios of sigmoids within a row matter (section 3.4 of paper 002).
    """

    kind: Literal["sigmoid_cs"] = Field(default="sigmoid_cs", kw_only=True, repr=False)
    paper = "002 eq 5"
    aligned = False

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(squares / 2 - F.logsigmoid(true))


@dataclass(frozen=True, config=STRICT)
class SoftmaxTanimoto(Loss):
    """-p_y / (1 + ||p|| - p_y), averaged over rows; its infimum is -1 (Eq. 7 of paper 002).

    Not aligned: only differences between logits within a row matter (section 3.5 of paper 002).
    """

    kind: Literal["softmax_tanimoto"] = Field(default="softmax_tanimoto", kw_only=True, repr=False)
    paper = "002 eq 7"
    statistic = "logsumexp z, logsumexp 2z, z_y"
    aligned = False
    reductions = (Reduction.LOGSUMEXP, Reduction.LOGSUMEXP, Reduction.SUM)
    tile = Tile(
        _once_and_twice, _slope_of_once_and_twice, (Reduction.LOGSUMEXP, Reduction.LOGSUMEXP)
    )

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        once, twice = _LogSumExps.apply(logits_BC)
        return once, twice, block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, squares, true = total
        return rows.mean(_tanimoto((true - lse).exp(), (squares / 2 - lse).exp()))


@dataclass(frozen=True, config=STRICT)
class SigmoidTanimoto(SigmoidLoss):
    """-s_y / (1 + ||s|| - s_y) with s = sigmoid(z), averaged over rows (Eq. 9 of paper 002).

    Aligned: near the infimum -1, every row has s_y near 1 and all other s near 0 (section 4.4 of
    paper 002).
    """

    kind: Literal["sigmoid_tanimoto"] = Field(default="sigmoid_tanimoto", kw_only=True, repr=False)
    paper = "002 eq 9"
    aligned = True

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean(_tanimoto(torch.sigmoid(true), (squares / 2).exp()))


class _LogSumExps(torch.autograd.Function):
    """Return logsumexp of z and of 2z over dim 1, computed with a single pass of exp.

    The gradient is zero for a row of -inf.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest = logits.amax(1)
        shift = torch.where(largest == -torch.inf, 0, largest)
        scaled = (logits - shift.unsqueeze(1)).exp_()
        once = shift + scaled.sum(1).log()
        twice = 2 * shift + torch.linalg.vecdot(scaled, scaled).log()
        ctx.save_for_backward(logits, once, twice)
        return once, twice

    @staticmethod
    def backward(ctx: Any, by_once: Tensor, by_twice: Tensor) -> Tensor:
        logits, once, twice = ctx.saved_tensors
        shift = torch.where(once == -torch.inf, 0, once)
        ratio = torch.where(once == -torch.inf, 0, (2 * once - twice).exp())  # 1..K
        p = (logits - shift.unsqueeze(1)).exp_()
        return torch.addcmul(by_once.unsqueeze(1), p, (2 * by_twice * ratio).unsqueeze(1)).mul_(p)


class _LogSumSquaredSigmoids(torch.autograd.Function):
    """Return log(sum(sigmoid(z)^2)) over dim 1, computed with a single pass of exp.

    The gradient is zero for a row of -inf. The computation uses e^c sigmoid(z) = 1 / (e^-c + w)
    with w = e^-(z + c) and c = max(0, -max z), so that the square of the largest term does not
    underflow. 1 - sigmoid(z) = w / (e^-c + w).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        largest = logits.amax(1)
        shift = torch.where(largest == -torch.inf, 0, (-largest).clamp(min=0))
        # The clamp keeps w finite, because inf * 0 in backward would be NaN. It does not change the
        # sum: the square of a term with w >= e^80 is below the rounding error of the sum.
        w = torch.sub(-shift.unsqueeze(1), logits).clamp_(max=80).exp_()
        scaled = (w + (-shift).exp().unsqueeze(1)).reciprocal_()
        sums = torch.linalg.vecdot(scaled, scaled)
        is_empty = largest == -torch.inf
        ctx.save_for_backward(w, scaled, sums.masked_fill(is_empty, torch.inf))
        return (sums.log() - 2 * shift).masked_fill(is_empty, -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        w, scaled, sums = ctx.saved_tensors
        return scaled.pow(3).mul_(w).mul_((2 * grad / sums).unsqueeze(1))


def _tanimoto(true: Tensor, norm: Tensor) -> Tensor:
    return -true / (1 + norm - true)
