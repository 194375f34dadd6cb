"""Cross-entropy and losses with the same statistics: self-normalization, batch cross-entropy."""

from typing import Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from heads.losses.base import (
    STRICT,
    Block,
    Loss,
    Reduction,
    Rows,
    Stats,
    logsumexp,
)
from heads.losses.sampling import SampledNegatives
from heads.losses.tile import LOGSUMEXP, Tile, one
from heads.optional_triton import jit


@jit
def _logit_twice(z):
    return z, z


@jit
def _slope_of_logit_twice(z):
    return one(z), one(z)


_LOGSUMEXP_AND_SUM = Tile(_logit_twice, _slope_of_logit_twice, (Reduction.LOGSUMEXP, Reduction.SUM))


@dataclass(frozen=True, config=STRICT)
class CrossEntropy(SampledNegatives, Loss):
    """-log p_y = logsumexp(z) - z_y, averaged over rows (Eq. 1 of paper 002).

    `label_smoothing` e assigns e/K of the target to every class (Szegedy et al. 2016). `z_loss` c
    adds c logsumexp(z)^2, which keeps logsumexp(z) near 0 (PaLM, Chowdhery et al. 2022).

    With a `sample_rate` r below 1, a training step computes the classes in its batch and, with
    probability r, each other class (Partial FC, An et al. 2021). -log r is added to the logits of
    these other classes, so that the sum of exp(z) has the correct expectation. The logarithm of the
    sum, and therefore the loss, is too low on average, by about (1/r - 1)/2 times the sum of p_j^2
    over the classes without a row in the batch. This Taylor approximation, half the relative
    variance of the sum, is accurate while it is small, and too large if a few classes dominate the
    sum. Evaluation uses all classes.

    With label sets, -log p_y is averaged over the labels of a row. A row without labels has the
    weight 0.
    """

    kind: Literal["ce"] = Field(default="ce", kw_only=True, repr=False)
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="share of the target to spread over all classes"
    )
    z_loss: float = Field(default=0.0, ge=0, description="weight of logsumexp(z)^2")
    sample_rate: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="probability that a step computes a class without a row in the batch",
    )

    paper = "002 eq 1"
    statistic = "logsumexp z, z_y (and sum z under label smoothing)"
    aligned_if = "z_loss > 0, unless label_smoothing > 0 and sample_rate < 1"
    label_sets = "labels"

    @property
    def reductions(self) -> tuple[Reduction, ...]:  # type: ignore[override]
        sums = (Reduction.SUM, Reduction.SUM) if self.label_smoothing else (Reduction.SUM,)
        return (Reduction.LOGSUMEXP, *sums)

    @property
    def tile(self) -> Tile:  # type: ignore[override]
        return _LOGSUMEXP_AND_SUM if self.label_smoothing else LOGSUMEXP

    @property
    def aligned(self) -> bool:
        """True if `z_loss` c > 0, unless label smoothing e > 0 is combined with sample rate r < 1.

        With c = 0, the loss depends only on differences within a row, so rows can be shifted apart
        (section 3.1 of paper 002). With c > 0 and e = 0, the loss is `self_norm`. Smoothing moves
        the minimum from infinity to z = log of the target: log(1 - e + e/K) at the label of every
        row, and log(e/K) elsewhere.

        Sampling with e = 0 keeps the infimum of every draw at 0. A small expectation therefore
        bounds the loss of the draw that contains all classes, and this loss separates the logits as
        above. With both smoothing and sampling, a class without a row gets its share e/K of the
        target only in the steps that draw it. With two classes, a small c and e > 2r / (1 + r), the
        logit of such a class exceeds the true logit at the minimum. Separation has not been proven
        for other values.
        """
        return self.z_loss > 0 and (self.label_smoothing == 0 or self.sample_rate == 1)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        weighted = logits_BC
        if block.weights is not None:
            weighted = logits_BC + block.weights.log().to(logits_BC.dtype)
        lse = logsumexp(weighted)
        if not self.label_smoothing:
            return lse, block.true
        if block.weights is None:
            return lse, logits_BC.sum(1), block.true
        return lse, logits_BC @ block.weights.to(logits_BC.dtype), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, *every, target = total
        lse = rows.at_labels(lse)
        if every:
            mean = rows.at_labels(every[0] / rows.num_classes)
            target = torch.lerp(target, mean, self.label_smoothing)
        of_labels = lse - target
        if self.z_loss:
            of_labels = of_labels + self.z_loss * lse.square()
        return rows.mean_over_labels(of_labels)


@dataclass(frozen=True, config=STRICT)
class SelfNormalization(Loss):
    """-log p_y + alpha log^2(sum exp z), averaged over rows (section 4.1 of paper 002).

    Aligned: near the infimum 0, every row has p_y near 1 and logsumexp(z) near 0, so z_y is near 0
    and the false logits are far below it (appendix A of paper 002).
    """

    kind: Literal["self_norm"] = Field(default="self_norm", kw_only=True, repr=False)
    alpha: float = Field(default=0.1, gt=0, description="weight of logsumexp(z)^2")

    paper = "002 section 4.1"
    statistic = "logsumexp z, z_y"
    aligned = True
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)
    tile = LOGSUMEXP

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, true = total
        return rows.mean(lse - true + self.alpha * lse.square())


@dataclass(frozen=True, config=STRICT)
class BatchCrossEntropy(Loss):
    """KL(P_B || Q_B) with one softmax over the entire batch (definition 2 of paper 002).

    P_B has probability 1/m at the label of each row (or in proportion to the row weights), so the
    loss is logsumexp of z over rows and classes, minus the mean of z_y, minus log m. The partition
    sum covers all rows, including rows of weight 0. A training step needs at
    least two rows; in evaluation, the loss of a single row equals `ce`.

    With label sets, P_B has probability 1/P at each of the P labels of the batch, or in proportion
    to the weight of the row times that of the class. All true logits then have the same share of
    the partition sum, however many labels their rows have. Rows without labels are only in the
    partition sum. The loss of a batch without labels is 0.

    Aligned: near the infimum 0, every true logit has a share near 1/m of the common partition sum,
    and every false logit has a share near 0 (appendix D of paper 002).
    """

    kind: Literal["batch_ce"] = Field(default="batch_ce", kw_only=True, repr=False)
    paper = "002 def 2"
    statistic = "logsumexp z, z_y (one Z for the batch)"
    aligned = True
    couples_rows = True
    label_sets = "labels"
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)
    tile = LOGSUMEXP

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return logsumexp(logits_BC), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        lse, true = total
        share = torch.ones_like(true) if rows.weights is None else rows.weights
        share = share / share.sum()
        log_z = logsumexp(lse.unsqueeze(0)).squeeze(0)
        if not len(true):
            return 0 * log_z
        return log_z + (torch.xlogy(share, share) - share * true).sum()
