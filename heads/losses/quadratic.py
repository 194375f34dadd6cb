"""Quadratic losses (paper 001): the squared distance between the logits and the one-hot label."""

import math
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import STRICT, Block, Loss, Reduction, Rows, Stats
from heads.losses.tile import Tile
from heads.optional_triton import jit


@jit
def _square(z):
    return (z * z,)


@jit
def _slope_of_square(z):
    return (2.0 * z,)


class QuadraticLoss(Loss):
    """(sum z^2 - 2 z_y + 1) / 2, averaged over rows."""

    statistic = "sum z^2, z_y"
    aligned = True
    num_power_sums = 2
    reductions = (Reduction.SUM, Reduction.SUM)
    tile = Tile(_square, _slope_of_square, (Reduction.SUM,))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logits_BC.square().sum(1), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean((squares - 2 * true + 1) / 2)


@dataclass(frozen=True, config=STRICT)
class Quadratic(QuadraticLoss):
    """1/2 ||onehot(y) - z||^2 = (sum z^2 - 2 z_y + 1) / 2, averaged over rows.

    The loss is defined in section II of paper 001.

    Aligned: near the infimum 0, every true logit is near 1 and every false logit near 0.
    """

    kind: Literal["quadratic"] = Field(default="quadratic", kw_only=True, repr=False)

    paper = "001 section II"


@dataclass(frozen=True, config=STRICT)
class CorrectClassQuadratic(QuadraticLoss):
    """The quadratic loss plus w/2 (1 - z_y)^2, averaged over rows (Eq. II.1 of paper 001).

    The last term is misprinted in the equation, but correct in the text of the paper. The default
    of `w` is sqrt(K - 1) - 1.

    Aligned: near the infimum 0, every true logit is near 1 and every false logit near 0.
    """

    kind: Literal["ccql"] = Field(default="ccql", kw_only=True, repr=False)
    w: float | None = Field(
        default=None,
        ge=0,
        description="additional weight of the true class; default: sqrt(K - 1) - 1",
    )

    paper = "001 eq II.1"

    def value(self, total: Stats, rows: Rows) -> Tensor:
        w = math.sqrt(rows.num_classes - 1) - 1 if self.w is None else self.w
        return super().value(total, rows) + w / 2 * rows.mean((1 - total[1]).square())
