"""Optimizers and learning-rate schedule of a recipe; the rate is a pure function of the step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW, Optimizer

from heads import ClassHead, FactoredHead
from trainer.config import Duration
from trainer.lamb import Lamb
from trainer.optimizer_config import OptimizerConfig, ScheduleConfig


def build_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The backbone's optimizer; vectors (norms, biases) are not decayed."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.kind == "lamb":
        groups[1]["adapted"] = False
    return _optimizer(config, [group for group in groups if group["params"]])


def build_head_optimizer(config: OptimizerConfig, head: ClassHead) -> Optimizer | None:
    """The head's, with its own rate and decay where the recipe gives them; its biases are a column
    of its matrix and decay with it. None for a factored head, which makes its own steps."""
    if isinstance(head, FactoredHead):
        return None
    group: dict[str, Any] = {"params": list(head.parameters()), "weight_decay": head_decay(config)}
    group["lr"] = head_rate(config)
    return _optimizer(config, [group], norm_group=head.engine.class_group)


def head_rate(config: OptimizerConfig) -> float:
    """The head's peak rate."""
    return config.lr if config.head.lr is None else config.head.lr


def head_decay(config: OptimizerConfig) -> float:
    """The head's weight decay."""
    own = config.head.weight_decay
    return config.weight_decay if own is None else own


def _optimizer(
    config: OptimizerConfig,
    groups: list[dict[str, Any]],
    norm_group: ProcessGroup | None = None,
) -> Optimizer:
    options = config.model_dump(exclude={"kind", "head"})
    match config.kind:
        case "sgd":
            return SGD(groups, **options)
        case "adamw":
            return AdamW(groups, **options)
        case "lamb":
            return Lamb(groups, **options, norm_group=norm_group)


def tensors_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter, as far as it is tensors."""
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def create_moments_of(optimizer: Optimizer) -> None:
    """Make the moments of all parameters exist, of any value; the parameters stay as they are."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # decay is scaled by it: nothing moves
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def rate_factor(
    step: int,
    *,
    schedule: ScheduleConfig,
    num_steps: int,
    num_samples: int,
    global_batch: int,
) -> float:
    """What the peak rates are multiplied by at step 0..num_steps-1; an epoch has `num_samples`."""

    def steps(duration: Duration) -> int:
        return duration.in_steps(num_samples=num_samples, global_batch=global_batch)

    warmup = steps(schedule.warmup)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match schedule.kind:
        case "cosine":
            share = (1 + math.cos(math.pi * progress)) / 2
            return schedule.final + (1 - schedule.final) * share
        case "linear":
            return 1 - (1 - schedule.final) * progress
        case "step":
            passed = sum(step >= steps(milestone) for milestone in schedule.milestones)
            return schedule.factor**passed
