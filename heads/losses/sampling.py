"""Random draws of classes that are the same on every rank: hashes of (draw, class or number)."""

import torch
from torch import Tensor

from heads.losses.base import Choice, HeldClasses

# The finalizer of splitmix64 (Steele, Lea, Flood 2014); its constants as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def uniform(draw: int, numbers: Tensor) -> Tensor:
    """Numbers in [0, 1), float64: one for each of `numbers` (int64), independent between draws."""
    start = _mix(torch.tensor([draw], device=numbers.device) * _GOLDEN + _GOLDEN)
    return _shifted(_mix(start + numbers * _GOLDEN), 11).double() / 2**53


def kept_and_sampled(held: HeldClasses, labels: Tensor, draw: int, rate: float) -> Choice:
    """Every class of `labels` for itself, and each other one with probability `rate`, then for
    1 / rate classes: sums over them have the expectation of sums over all."""
    chosen = uniform(draw, held.class_ids) < rate
    weights = torch.full_like(held.class_ids, 1 / rate, dtype=torch.float64)
    _, own = held.find(labels)
    chosen[own], weights[own] = True, 1.0
    positions = chosen.nonzero().squeeze(1)
    return Choice(positions, weights[positions])


def drawn_from(
    cumulative: Tensor, held: HeldClasses, labels: Tensor, draw: int, num: int
) -> Choice:
    """The classes of `labels`, and `num` drawn from q with replacement, `cumulative` [K] being q's.

    A class that came c times stands for c / (num q) classes, one that did not come for none.
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


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)) * _FACTORS[0]
    value = (value ^ _shifted(value, 27)) * _FACTORS[1]
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: int64 has only an arithmetic one."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
