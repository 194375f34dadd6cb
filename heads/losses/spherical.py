"""The spherical family of losses (paper 004), which depend only on sum z, sum z^2 and z_y."""

import math
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import STRICT, Block, Loss, Reduction, Rows, Stats
from heads.losses.tile import Tile, one
from heads.optional_triton import jit


@jit
def _logit_and_square(z):
    return z, z * z


@jit
def _slope_of_logit_and_square(z):
    return one(z), 2.0 * z


class SphericalLoss(Loss):
    """A loss that depends on the logits of a row only through their sum, squared norm and z_y."""

    statistic = "sum z, sum z^2, z_y"
    aligned = False
    num_power_sums = 3
    reductions = (Reduction.SUM, Reduction.SUM, Reduction.SUM)
    tile = Tile(_logit_and_square, _slope_of_logit_and_square, (Reduction.SUM, Reduction.SUM))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logits_BC.sum(1), logits_BC.square().sum(1), block.true


@dataclass(frozen=True, config=STRICT)
class TaylorSoftmax(SphericalLoss):
    """-log((1 + z_y + z_y^2 / 2) / its sum over classes), averaged over rows (paper 004).

    Not aligned: only ratios of scores within a row matter.
    """

    kind: Literal["taylor_softmax"] = Field(default="taylor_softmax", kw_only=True, repr=False)
    paper = "004 Taylor softmax"
    score_kind = "taylor"

    def value(self, total: Stats, rows: Rows) -> Tensor:
        linear, squares, true = total
        norm = rows.num_classes + linear + squares / 2
        return rows.mean(norm.log() - self.score(true).log())


@dataclass(frozen=True, config=STRICT)
class SphericalSoftmax(SphericalLoss):
    """-log((z_y^2 + eps) / its sum over classes), averaged over rows (paper 004).

    The loss is an even function of z, so all gradients are zero at zero weights: initialize the
    weights randomly.

    Not aligned: only ratios of scores within a row matter.
    """

    kind: Literal["spherical_softmax"] = Field(
        default="spherical_softmax", kw_only=True, repr=False
    )
    eps: float = Field(default=1e-2, gt=0, description="constant added to z^2")

    paper = "004 spherical softmax"
    score_kind = "spherical"

    def value(self, total: Stats, rows: Rows) -> Tensor:
        _, squares, true = total
        norm = squares + rows.num_classes * self.eps
        return rows.mean(norm.log() - self.score(true).log())

    @property
    def score_eps(self) -> float:  # type: ignore[override]
        return self.eps


@dataclass(frozen=True, config=STRICT)
class SphericalBound(SphericalLoss):
    """Bouchard's (2007) upper bound on cross-entropy at a fixed `xi`, averaged over rows.

    The loss is described in paper 004.

    Not aligned: shifting a row does not change its value, as with cross-entropy.
    """

    kind: Literal["spherical_bound"] = Field(default="spherical_bound", kw_only=True, repr=False)
    xi: float = Field(default=1.0, gt=0, description="parameter of the bound")

    paper = "004 upper bound"

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
