"""Losses that make every class a question of its own: binary cross-entropy, noise contrast."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.losses.base import Block, Choice, HeldClasses, Loss, Reduction, Rows, Stats
from heads.losses.checks import at_least
from heads.losses.sampling import drawn_from

_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """-log sigmoid(z_y) - sum over j != y of log(1 - sigmoid(z_j)), the mean over rows.

    002, section 4.3; the sign of its second term is a slip in print. As softplus(z) - z =
    softplus(-z), the loss is the sum of softplus(z) over all classes less z_y.

    Aligned: near the infimum 0 every z_y is far above 0 and every false z far below it (002,
    appendix C).
    """

    kind = "bce"
    paper = "002 section 4.3"
    statistic = "sum softplus z, z_y"
    aligned = True
    reductions = (Reduction.SUM, Reduction.SUM)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        return softplus(logits_BC).sum(1), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        every, true = total
        return rows.mean(every - true)

    def initial_bias(self, num_classes: int) -> float:
        """The logit of 1/K: from 0, K - 1 false classes a row drown the true one's gradient."""
        return -math.log(max(num_classes - 1, 1))


@dataclass(frozen=True, eq=False)
class NoiseContrastiveEstimation(Loss):
    """-log g_y - t E_{j ~ q} log(1 - g_j) with g_j = sigmoid(z_j - log(t q_j)) (002, eq 8).

    `noise` q [K] is positive and sums to 1. The expectation is exact, over all classes; with
    `samples` n a training step takes the mean over n classes drawn from q, which all rows share and
    whose expectation is the same. Evaluation takes all classes.

    Aligned: at the infimum g_y = 1 / (1 + t q_y), which is z_y = 0 for every class, and the false
    logits are at minus infinity (002, appendix B). Sampling does not change the expectation.
    """

    noise: Tensor
    t: int = 10
    samples: int | None = None
    _cumulative: Tensor = field(init=False, repr=False)

    kind = "nce"
    paper = "002 eq 8"
    statistic = "expectation under q of log(1 - g_j), z_y"
    aligned = True
    reductions = (Reduction.SUM, Reduction.SUM)

    def __post_init__(self) -> None:
        if not (self.noise > 0).all():
            raise ValueError("nce needs a noise distribution that is positive for every class")
        # Frequencies in float32 may miss 1 by rounding; counts in their place miss it by far.
        total = float(self.noise.double().sum())
        if not abs(total - 1) <= _SUM_TOLERANCE:
            raise ValueError(f"nce noise sums to {total:.6g}: divide it by its sum")
        at_least(self.kind, "t", self.t, 1)
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"nce samples is {self.samples}: give at least 1, or none")
        # On the CPU, where sums come out the same every time: all ranks must draw alike.
        cumulative = self.noise.cpu().double().cumsum(0).to(self.noise.device)
        object.__setattr__(self, "_cumulative", cumulative)

    def check_classes(self, num_classes: int) -> None:
        if self.noise.shape != (num_classes,):
            raise ValueError(
                f"nce noise has shape {list(self.noise.shape)} and there are {num_classes} "
                "classes: give one number a class"
            )

    def to(self, device: torch.device) -> "NoiseContrastiveEstimation":
        return replace(self, noise=self.noise.to(device))

    def choose(self, held: HeldClasses, labels: Tensor, draw: int | None) -> Choice | None:
        if draw is None or self.samples is None:
            return None
        return drawn_from(self._cumulative, held, labels, draw, self.samples)

    def statistics(self, logits_BC: Tensor, block: Block) -> Stats:
        q = self.noise[block.class_ids]
        shift = (self.t * q).log().to(logits_BC.dtype)
        share = q if block.weights is None else q * block.weights
        return softplus(logits_BC - shift) @ share.to(logits_BC.dtype), block.true

    def value(self, total: Stats, rows: Rows) -> Tensor:
        expected, true = total
        own = (self.t * self.noise[rows.labels].to(true.dtype)).log()
        return rows.mean(softplus(own - true) + self.t * expected)

    def initial_bias(self, num_classes: int) -> float:
        """log(1/K): the logits of a normalised model that knows nothing."""
        return -math.log(num_classes)


def softplus(z: Tensor) -> Tensor:
    """log(1 + exp(z)); above 50, where torch then returns z, exact to float64's last bit."""
    return F.softplus(z, threshold=50)
