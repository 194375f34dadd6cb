"""Decoupled softmax: each label of a row competes only with the classes that are not its labels."""

from typing import Literal

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
from heads.losses.binary_cross_entropy import softplus
from heads.losses.sampling import SampledNegatives
from heads.losses.tile import LOGSUMEXP


@dataclass(frozen=True, config=STRICT)
class DecoupledSoftmax(SampledNegatives, Loss):
    """-log(exp z_y / (exp z_y + sum of exp z over the negatives)), summed over the labels of a row
    and averaged over rows (DEXML, Gupta et al. 2024).

    The negatives are the classes that are not labels of the row. With `ce`, the labels of a row
    share one softmax, so the logit of a label falls if another label of the row is easy to predict.
    Here, they do not affect each other. Their terms are summed, so that every label has the same
    weight however many labels its row has; the code of the paper divides them by the number of
    labels. A row without labels has the weight 0. With one label per row, the loss equals `ce`.

    With a `sample_rate` r below 1, a training step computes only the classes that occur in its
    batch and, with probability r, each other class, as in `ce`.

    Not aligned: only differences between logits within a row matter.
    """

    kind: Literal["decoupled_softmax"] = Field(
        default="decoupled_softmax", kw_only=True, repr=False
    )
    sample_rate: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="probability that a step computes a class without a row in the batch",
    )

    paper = "DEXML (Gupta et al. 2024)"
    statistic = "logsumexp z of the negatives, z_y"
    aligned = False
    label_sets = "labels"
    reductions = (Reduction.LOGSUMEXP, Reduction.SUM)
    tile = LOGSUMEXP

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        negatives = block.false_logits(logits_BC)
        if block.weights is not None:
            negatives = negatives + block.weights.log().to(negatives.dtype)
        return logsumexp(negatives), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        negatives, true = total
        return rows.mean_over_labels(softplus(rows.at_labels(negatives) - true), summed=True)
