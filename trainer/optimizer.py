"""Optimizer and learning-rate schedule of a recipe; the rate is a pure function of the step."""

import math

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from heads import FactoredHead
from trainer.config import Duration, OptimizerConfig, ScheduleConfig


def build_optimizer(config: OptimizerConfig, module: nn.Module) -> Optimizer:
    """One optimizer over a module's parameters; vectors (norms, biases) are not decayed.

    The head's biases are a column of its matrix and decay with it. A factored head is left out: it
    makes its own steps.
    """
    own = {
        parameter
        for part in module.modules()
        if isinstance(part, FactoredHead)
        for parameter in part.parameters()
    }
    parameters = [p for p in module.parameters() if p.requires_grad and p not in own]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    options = config.model_dump(exclude={"kind"})
    return {"sgd": SGD, "adamw": AdamW}[config.kind](groups, **options)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def rate_at(
    step: int,
    *,
    peak: float,
    schedule: ScheduleConfig,
    num_steps: int,
    num_samples: int,
    global_batch: int,
) -> float:
    """The learning rate of step 0..num_steps-1, for an epoch of `num_samples`."""

    def steps(duration: Duration) -> int:
        return duration.in_steps(num_samples=num_samples, global_batch=global_batch)

    warmup = steps(schedule.warmup)
    if step < warmup:
        return peak * (step + 1) / warmup
    match schedule.kind:
        case "cosine":
            progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
            share = (1 + math.cos(math.pi * progress)) / 2
            return peak * (schedule.final + (1 - schedule.final) * share)
        case "step":
            passed = sum(step >= steps(milestone) for milestone in schedule.milestones)
            return peak * schedule.factor**passed
