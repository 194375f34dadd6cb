"""Losses with one binary decision per class: binary cross-entropy, noise-contrastive estimation."""

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from heads.losses.base import (
    STRICT,
    Block,
    Choice,
    ClassFacts,
    HeldClasses,
    Loss,
    Reduction,
    Rows,
    Stats,
)
from heads.losses.sampling import drawn_from
from heads.losses.tile import Tile, tile_sigmoid, tile_softplus
from heads.optional_triton import jit

# A class without samples is treated as if it had half a sample, because q must be positive.
_HALF_A_SAMPLE = 0.5


@jit
def _softplus(z):
    return (tile_softplus(z),)


@jit
def _slope_of_softplus(z):
    return (tile_sigmoid(z),)


@dataclass(frozen=True, config=STRICT)
class BinaryCrossEntropy(Loss):
    """-log sigmoid(z_y) - sum over j != y of log(1 - sigmoid(z_j)), averaged over rows.

    Section 4.3 of paper 002 defines the loss, but misprints the sign of the second term. Because
    softplus(z) - z = softplus(-z), the loss is the sum of softplus(z) over all classes, minus z_y.
    With label sets, it is -log sigmoid(z) over the labels of a row and -log(1 - sigmoid(z)) over
    the other classes: the sum of softplus(z) over all classes, minus the sum of z over the labels.

    Aligned: near the infimum 0, every z_y is far above 0 and every false z is far below 0 (appendix
    C of paper 002).
    """

    kind: Literal["bce"] = Field(default="bce", kw_only=True, repr=False)
    paper = "002 section 4.3"
    statistic = "sum softplus z, z_y"
    aligned = True
    label_sets = "rows"
    reductions = (Reduction.SUM, Reduction.SUM)
    tile = Tile(_softplus, _slope_of_softplus, (Reduction.SUM,))

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return softplus(logits_BC).sum(1), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, true = total
        return rows.mean(every - rows.over_labels(true))

    def initial_bias(self, num_classes: int) -> float:
        """Return the logit of 1/K. With a bias of 0, the gradients of the K - 1 false classes of a
        row would dominate the gradient of its true class."""
        return -math.log(max(num_classes - 1, 1))


@dataclass(frozen=True, config=STRICT)
class NoiseContrastiveEstimation(Loss):
    """-log g_y - t E_{j ~ q} log(1 - g_j) with g_j = sigmoid(z_j - log(t q_j)).

    This is Eq. 8 of paper 002. The distribution q (`noise`) is uniform, or proportional to the
    number of training samples of each class. By default, the expectation over all classes is exact.
    With `samples` n, a training step replaces it with the mean over n classes that are drawn from q
    and shared by all rows. This estimate is unbiased. Evaluation uses all classes.

    Aligned: at the infimum, g_y = 1 / (1 + t q_y), that is, z_y = 0 for every class, and the false
    logits are at minus infinity (appendix B of paper 002). Sampling preserves the expectation.
    """

    kind: Literal["nce"] = Field(default="nce", kw_only=True, repr=False)
    t: int = Field(default=10, gt=0, description="number of noise samples per row")
    samples: int | None = Field(
        default=None,
        gt=0,
        description="number of classes to draw per step; default: the exact expectation",
    )
    noise: Literal["uniform", "frequency"] = Field(
        default="frequency",
        description="q: the same for every class, or each class's share of the training labels",
    )

    # Set by `prepare`: q [K] and its cumulative sums.
    q: ClassVar[Tensor]
    cumulative_q: ClassVar[Tensor]

    paper = "002 eq 8"
    statistic = "expectation under q of log(1 - g_j), z_y"
    aligned = True
    label_sets = "rows"
    reductions = (Reduction.SUM, Reduction.SUM)
    without_tile = "its terms depend on the noise distribution"

    @property
    def needs_class_counts(self) -> bool:
        return self.noise == "frequency"

    def prepare(self, facts: ClassFacts) -> Self:
        counts = torch.ones(facts.num_classes) if self.noise == "uniform" else facts.counts
        if counts is None and "q" in vars(self):
            return super().prepare(facts)
        if counts is None:
            raise ValueError(
                "nce with noise=frequency needs the number of training samples per class: pass "
                "class_counts, or set noise=uniform"
            )
        if counts.shape != (facts.num_classes,):
            raise ValueError(
                f"nce: class_counts have shape {list(counts.shape)}, but there are "
                f"{facts.num_classes} classes: pass one number for each class"
            )
        counts = counts.double()
        if not (counts.isfinite() & (counts >= 0)).all():
            raise ValueError(
                "nce: class_counts contain a negative or non-finite number: pass finite numbers of "
                "at least 0"
            )
        counts = counts.where(counts > 0, _HALF_A_SAMPLE)
        q = counts / counts.sum()
        # All ranks must draw the same classes, so sum on the CPU, where the order is deterministic.
        return self.with_constants(q=q, cumulative_q=q.cpu().cumsum(0).to(q.device))

    def sampled(self, num_classes: int, num_labels: int) -> float | None:
        return None if self.samples is None else self.samples + num_labels

    def choose(self, held: HeldClasses, labels: Tensor, draw: int | None) -> Choice | None:
        if draw is None or self.samples is None:
            return None
        return drawn_from(self.cumulative_q, held, labels, draw, self.samples)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        q = self.q[block.class_ids]
        shift = (self.t * q).log().to(logits_BC.dtype)
        share = q if block.weights is None else q * block.weights
        terms = softplus(logits_BC - shift)
        return torch.linalg.vecdot(terms, share.to(logits_BC.dtype)), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        expected, true = total
        own = (self.t * self.q[rows.labels].to(true.dtype)).log()
        return rows.mean(rows.over_labels(softplus(own - true)) + self.t * expected)

    def initial_bias(self, num_classes: int) -> float:
        """Return log(1/K), the logit of a normalized model that predicts all classes equally."""
        return -math.log(num_classes)


def softplus(z: Tensor) -> Tensor:
    """Return log(1 + exp(z)). For z above 50, torch returns z, which is exact in float64."""
    return F.softplus(z, threshold=50)
