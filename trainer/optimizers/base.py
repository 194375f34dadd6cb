"""The base class of optimizers, and functions that build and use a run's optimizers.

An optimizer class defines its options and their bounds, builds the torch optimizer, and declares
the memory of a step. To add one, write a subclass in its own file and add it to `__init__.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from data.base_config import FrozenConfig
from heads import ClassHead, FactoredHead, FusedSGD
from trainer.optimizers.rounded import RoundedOptimizer

Beta = Annotated[float, Field(ge=0, lt=1)]


class HeadOptions(FrozenConfig):
    """Options for the head. None selects the backbone's value."""

    lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of the head, which uses the schedule of the backbone",
    )
    weight_decay: float | None = Field(None, ge=0)
    fused_sgd: Literal["in_backward", "deferred"] | None = Field(
        None,
        description="train the head with SGD without momentum, without storing the gradient of "
        "the class rows; in_backward: update them in the backward pass; deferred: update them "
        "after it, which allows clipping and skipped steps but computes the logits once more",
    )


class OptimizerKind(FrozenConfig, ABC):
    """Options of an optimizer. A subclass adds `kind: Literal[...]`, its own options and bounds."""

    # Whether the optimizer supports the factored head, which updates itself with plain SGD.
    trains_factored_head: ClassVar[bool] = False
    # Whether a step is proportional to the gradient, so that learned scalars of the head need their
    # own rates (`ClassHead.sgd_rates`).
    follows_gradient: ClassVar[bool] = False

    # Whether the step of a number depends only on its own gradient and state, so that bf16 class
    # rows can be updated in pieces.
    is_elementwise: ClassVar[bool] = False

    kind: str
    lr: float = Field(gt=0)
    head: HeadOptions = HeadOptions()
    weight_decay: float = Field(0.01, ge=0)

    @property
    @abstractmethod
    def num_moments(self) -> int:
        """The number of state tensors per weight that have the weight's size."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Build the torch optimizer for parameter `groups`. A parameter may be a piece of a tensor
        that is sharded over the ranks."""

    @property
    def head_lr(self) -> float:
        """The head's peak learning rate."""
        return self.lr if self.head.lr is None else self.head.lr

    @property
    def head_weight_decay(self) -> float:
        return self.weight_decay if self.head.weight_decay is None else self.head.weight_decay

    def options(self) -> dict[str, Any]:
        """Return the arguments of the torch optimizer: all options except the head's."""
        return self.model_dump(exclude={"kind", "head"})


def build_optimizer(config: OptimizerKind, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Build the backbone's optimizer. Vectors (norms, biases) have no weight decay."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return config.build([group for group in groups if group["params"]])


def build_head_optimizer(
    config: OptimizerKind, head: ClassHead, *, clips: bool = True
) -> Optimizer | None:
    """Build the head's optimizer, with its own learning rate and weight decay if the recipe sets
    them. Weight decay applies to the class biases too, but not to a learned scale or offset.
    Returns None for a factored head, which updates itself. With `optimizer.head.fused_sgd`, the
    norm of the gradient of the class rows is computed only if `clips`.
    """
    if isinstance(head, FactoredHead):
        return None
    if config.head.fused_sgd is not None:
        return FusedSGD(
            head,
            lr=config.head_lr,
            weight_decay=config.head_weight_decay,
            deferred=config.head.fused_sgd == "deferred",
            needs_norm=clips,
        )
    factors = head.sgd_rates()
    if not config.follows_gradient:
        factors = dict.fromkeys(factors, 1.0)
    groups = [
        {
            "params": [parameter],
            "lr": config.head_lr * factors[name],
            "lr_factor": factors[name],
            "weight_decay": config.head_weight_decay if parameter.ndim else 0.0,
        }
        for name, parameter in head.named_parameters()
    ]
    if head.weight.dtype == torch.bfloat16:
        return RoundedOptimizer(head, groups, config.build)
    return config.build(groups)


def tensors_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the tensors that an optimizer stores for a parameter."""
    state = optimizer.state.get(parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


def create_moments_of(optimizer: Optimizer) -> None:
    """Create the moments of all parameters with arbitrary values. The parameters do not change."""
    if isinstance(optimizer, FusedSGD):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # lr also scales weight decay, so the parameters do not change
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def create_momentum(optimizer: Optimizer | None) -> None:
    """Initialize the momentum of torch's SGD to zero. The result of the first step stays the same.

    Without this, fused SGD leaves the momentum uninitialized if the first step is skipped (torch
    2.13).
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate, times the `lr_factor` of each parameter group that has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
