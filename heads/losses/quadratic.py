"""Quadratic losses (paper 001): the logits are pulled towards the one-hot label."""

import math
from dataclasses import dataclass

from torch import Tensor

from heads.losses.base import Block, Loss, Reduction, Rows, Stats
from heads.losses.checks import at_least


@dataclass(frozen=True)
class Quadratic(Loss):
    """1/2 ||onehot(y) - z||^2 = (sum z^2 - 2 z_y + 1) / 2, the mean over rows (001, section II).

    Aligned: near the infimum 0 every true logit is near 1 and every false one near 0.
    """

    kind = "quadratic"
    paper = "001 section II"
    statistic = "sum z^2, z_y"
    aligned = True
    reductions = (Reduction.SUM, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logits_BC.square().sum(1), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        squares, true = total
        return rows.mean((squares - 2 * true + 1) / 2)


@dataclass(frozen=True)
class CorrectClassQuadratic(Quadratic):
    """The quadratic loss plus w/2 (1 - z_y)^2, the mean over rows (001, eq II.1).

    The last term is garbled in print; the text fixes it. `w` None is sqrt(K - 1) - 1. Aligned, as
    `quadratic`.
    """

    w: float | None = None

    kind = "ccql"
    paper = "001 eq II.1"

    def __post_init__(self) -> None:
        if self.w is not None:
            at_least(self.kind, "w", self.w, 0)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        w = math.sqrt(rows.num_classes - 1) - 1 if self.w is None else self.w
        return super().value(total, rows) + w / 2 * rows.mean((1 - total[1]).square())
