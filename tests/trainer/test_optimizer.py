"""Optimizers and schedules: learning rates match closed forms, and weight decay applies to the
right tensors."""

import math

import pytest
import torch
from torch import nn

from heads import ClassHead, CrossEntropy
from trainer.config import Duration
from trainer.optimizers import (
    SGD,
    AdamW,
    build_head_optimizer,
    build_optimizer,
)
from trainer.schedules import Cosine, Linear, RunLength, Schedule, Step

PEAK, NUM_STEPS = 0.4, 40


def rates(schedule: Schedule, *, num_steps: int = NUM_STEPS) -> list[float]:
    """Return all learning rates of a run on 100 samples in batches of 10, so that an epoch is 10
    steps.
    """
    length = RunLength(num_steps, num_samples=100, global_batch=10)
    return [PEAK * schedule.rate_factor(step, length) for step in range(num_steps)]


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_cosine_decays_from_the_peak_to_the_final_rate(final):
    got = rates(Cosine(final=final))
    low = final * PEAK
    expected = [
        low + (PEAK - low) * math.cos(math.pi * t / (2 * NUM_STEPS)) ** 2 for t in range(40)
    ]
    assert got == pytest.approx(expected)
    assert got[0] == PEAK
    assert got[NUM_STEPS // 2] == pytest.approx((PEAK + low) / 2)
    length = RunLength(NUM_STEPS, num_samples=100, global_batch=10)
    after_the_end = PEAK * Cosine(final=final).rate_factor(NUM_STEPS, length)
    assert after_the_end == pytest.approx(low)


@pytest.mark.parametrize("warmup", [Duration(steps=8), Duration(epochs=0.8), Duration(samples=80)])
def test_warmup_is_linear_and_ends_at_the_peak(warmup):
    got = rates(Cosine(warmup=warmup))
    assert got[:8] == pytest.approx([PEAK * (t + 1) / 8 for t in range(8)])
    expected = [PEAK * (1 + math.cos(math.pi * t / 32)) / 2 for t in range(32)]
    assert got[8:] == pytest.approx(expected)


def test_steps_multiply_the_rate_at_each_milestone():
    schedule = Step(
        warmup=Duration(steps=5),
        milestones=(Duration(epochs=2), Duration(steps=30)),
        factor=0.5,
    )
    got = rates(schedule)
    assert got[:5] == pytest.approx([PEAK * (t + 1) / 5 for t in range(5)])
    assert got[5:] == pytest.approx([PEAK] * 15 + [PEAK / 2] * 10 + [PEAK / 4] * 10)


def model() -> nn.Module:
    """Return a model with a matrix, a convolution, biases, a norm, a head and a frozen matrix."""
    torch.manual_seed(0)
    network = nn.ModuleDict(
        {
            "linear": nn.Linear(3, 4),
            "conv": nn.Conv2d(1, 2, 3),
            "norm": nn.BatchNorm1d(4),
            "head": ClassHead(4, 6, CrossEntropy()),
            "frozen": nn.Linear(2, 2, bias=False),
        }
    )
    network["frozen"].requires_grad_(False)
    network["head"].bias.data.fill_(1.0)
    return network


def test_linear_decays_from_the_peak_to_the_final_rate():
    got = rates(Linear(warmup=Duration(steps=8), final=0.5))
    assert got[:8] == pytest.approx([PEAK * (t + 1) / 8 for t in range(8)])
    assert got[8:] == pytest.approx([PEAK * (1 - 0.5 * t / 32) for t in range(32)])


DECAYING = [
    SGD(lr=0.5, weight_decay=0.1),
    AdamW(lr=0.5, weight_decay=0.1),
]


@pytest.mark.parametrize("config", DECAYING)
def test_weight_decay_applies_to_matrices_and_the_head_but_not_to_vectors(config):
    """With zero gradients, a step consists of the decay alone: w (1 - lr * decay)."""
    network = model()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    of_backbone = [
        parameter
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and not name.startswith("head.")
    ]
    build_optimizer(config, of_backbone).step()
    build_head_optimizer(config, network["head"]).step()
    decayed = {"linear.weight", "conv.weight", "head.weight", "head.bias"}
    for name, parameter in network.named_parameters():
        share = 0.95 if name in decayed else 1.0
        torch.testing.assert_close(parameter.detach(), share * before[name], msg=name)
    assert any(before[name].any() for name in before.keys() - decayed)
