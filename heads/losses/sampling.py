"""Random draws of classes that are the same on every rank.

Random numbers are hashes of (draw, class ID or index), so ranks do not need to communicate, and
each rank computes only the numbers of its own classes.
"""

import torch
from torch import Tensor

from heads.losses.base import Choice, HeldClasses
from heads.rows.hashing import GOLDEN, mix, shifted


def uniform(draw: int, numbers: Tensor) -> Tensor:
    """Return a uniform float64 in [0, 1) for each of `numbers` (int64), independent across
    draws."""
    start = mix(torch.tensor([draw], device=numbers.device) * GOLDEN + GOLDEN)
    return shifted(mix(start + numbers * GOLDEN), 11).double() / 2**53


class SampledNegatives:
    """A loss that computes the classes of the batch with weight 1 and, with probability
    `sample_rate` r, each other class with weight 1 / r.

    The expectation of a weighted sum over the chosen classes is the sum over all classes.
    """

    sample_rate: float

    def sampled(self, num_classes: int, num_labels: int) -> float | None:
        return None if self.sample_rate == 1 else num_classes * self.sample_rate + num_labels

    def choose(self, held: HeldClasses, labels: Tensor, draw: int | None) -> Choice | None:
        if draw is None or self.sample_rate == 1:
            return None
        chosen = uniform(draw, held.class_ids) < self.sample_rate
        weights = torch.full_like(held.class_ids, 1 / self.sample_rate, dtype=torch.float64)
        _, own = held.find(labels)
        chosen[own], weights[own] = True, 1.0
        positions = chosen.nonzero().squeeze(1)
        return Choice(positions, weights[positions])


def drawn_from(
    cumulative: Tensor, held: HeldClasses, labels: Tensor, draw: int, num: int
) -> Choice:
    """Choose the classes of `labels`, and `num` classes drawn with replacement from q.

    `cumulative` [K] is the cumulative sum of q. A class that is drawn c times gets weight
    c / (num q), so a class of `labels` that is not drawn gets weight 0.
    """
    numbers = torch.arange(num, device=cumulative.device)
    drawn = torch.searchsorted(cumulative, uniform(draw, numbers) * cumulative[-1], right=True)
    drawn, counts = drawn.clamp_(max=len(cumulative) - 1).unique(return_counts=True)
    q = (cumulative[drawn] - torch.where(drawn > 0, cumulative[drawn - 1], 0)) / cumulative[-1]
    weights = torch.zeros_like(held.class_ids, dtype=torch.float64)
    here, positions = held.find(drawn)
    weights[positions] = (counts / (num * q))[here]
    chosen = weights > 0
    chosen[held.find(labels)[1]] = True
    positions = chosen.nonzero().squeeze(1)
    return Choice(positions, weights[positions])
