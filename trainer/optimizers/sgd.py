"""Stochastic gradient descent."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch.optim import Optimizer

from trainer.optimizers.base import OptimizerKind


class SGD(OptimizerKind):
    """`torch.optim.SGD`: weight decay is added to the gradient, and momentum is not dampened."""

    trains_factored_head: ClassVar[bool] = True
    follows_gradient: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(5e-4, ge=0)

    @model_validator(mode="after")
    def _check_nesterov(self) -> "SGD":
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov requires a momentum above 0")
        return self

    @property
    def num_moments(self) -> int:
        return int(self.momentum > 0)

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.SGD(groups, **self.options(), fused=True)
