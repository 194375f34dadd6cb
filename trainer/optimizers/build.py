"""The optimizers of a run, and the tensors that they keep."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heads import ClassHead, FactoredHead
from trainer.optimizers.base import OptimizerKind


def build_optimizer(config: OptimizerKind, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The backbone's optimizer; vectors (norms, biases) are not decayed."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return config.build([group for group in groups if group["params"]])


def build_head_optimizer(config: OptimizerKind, head: ClassHead) -> Optimizer | None:
    """The head's optimizer, with its own rate and decay if the recipe sets them. Its bias has the
    same, a learned scale or offset does not decay. None for a factored head, which takes its own
    steps."""
    if isinstance(head, FactoredHead):
        return None
    # A group for each: LAMB does not scale the steps of groups of vectors.
    groups = [
        {
            "params": [parameter],
            "lr": config.head_lr,
            "weight_decay": config.head_weight_decay if parameter.ndim else 0.0,
        }
        for parameter in head.parameters()
    ]
    return config.build(groups, norm_group=head.engine.class_group)


def tensors_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The tensors that an optimizer keeps for a parameter."""
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def create_moments_of(optimizer: Optimizer) -> None:
    """Create the moments of all parameters, with any values, and leave the parameters unchanged."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # it also scales the decay, so no parameter changes
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
