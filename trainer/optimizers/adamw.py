"""Adam with decoupled weight decay."""

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch.optim import Optimizer

from trainer.optimizers.base import Beta, OptimizerKind


class AdamW(OptimizerKind):
    """`torch.optim.AdamW` (Loshchilov and Hutter 2019)."""

    is_elementwise: ClassVar[bool] = True

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)

    @property
    def num_moments(self) -> int:
        return 2

    def build(self, groups: list[dict[str, Any]]) -> Optimizer:
        return torch.optim.AdamW(groups, **self.options(), fused=True)
