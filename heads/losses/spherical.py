"""The spherical family (paper 004): losses of sum z, sum z^2 and z_y alone."""

import math
from dataclasses import dataclass

from torch import Tensor

from heads.losses.base import Block, Loss, Reduction, Rows, Stats
from heads.losses.checks import above


class SphericalLoss(Loss):
    """A loss that depends on a row's logits by their sum, their squared norm and z_y only."""

    statistic = "sum z, sum z^2, z_y"
    aligned = False
    reductions = (Reduction.SUM, Reduction.SUM, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logits_BC.sum(1), logits_BC.square().sum(1), block.true


@dataclass(frozen=True)
class TaylorSoftmax(SphericalLoss):
    """-log of (1 + z_y + z_y^2 / 2) over its sum, the mean over rows (004, Taylor softmax).

    Not aligned: only ratios of scores within a row count.
    """

    kind = "taylor_softmax"
    paper = "004 Taylor softmax"
    score_kind = "taylor"

    def value(self, total: Stats, rows: Rows) -> Tensor:
        linear, squares, true = total
        norm = rows.num_classes + linear + squares / 2
        return rows.mean(norm.log() - self.score(true).log())


@dataclass(frozen=True)
class SphericalSoftmax(SphericalLoss):
    """-log of (z_y^2 + eps) over its sum, the mean over rows (004, spherical softmax).

    Even in z: with zero weights every gradient is zero, so start from random ones.

    Not aligned: only ratios of scores within a row count.
    """

    eps: float = 1e-2

    kind = "spherical_softmax"
    paper = "004 spherical softmax"
    score_kind = "spherical"

    def __post_init__(self) -> None:
        above(self.kind, "eps", self.eps, 0)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        _, squares, true = total
        norm = squares + rows.num_classes * self.eps
        return rows.mean(norm.log() - self.score(true).log())

    @property
    def score_eps(self) -> float:  # type: ignore[override]
        return self.eps


@dataclass(frozen=True)
class SphericalBound(SphericalLoss):
    """Bouchard's (2007) upper bound of cross-entropy at a fixed `xi`, the mean over rows (004).

    Not aligned: a row that is shifted keeps its value, as with cross-entropy.
    """

    xi: float = 1.0

    kind = "spherical_bound"
    paper = "004 upper bound"

    def __post_init__(self) -> None:
        above(self.kind, "xi", self.xi, 0)

    def value(self, total: Stats, rows: Rows) -> Tensor:
        linear, squares, true = total
        num, xi = rows.num_classes, self.xi
        curvature = (1 / (1 + math.exp(-xi)) - 0.5) / (2 * xi)
        constant = (
            -((num - 2) ** 2) / (16 * num * curvature)
            - num * xi / 2
            - num * curvature * xi**2
            + num * math.log1p(math.exp(xi))
        )
        spread = squares - linear.square() / num
        return rows.mean(constant + linear / num + curvature * spread - true)
