"""DDP: every rank stores a copy of the backbone, and gradients are summed one bucket at a time."""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from heads.gradients import sum_gradients
from trainer.backbone.batch_norm import BufferCopies
from trainer.strategies.base import Sharding, Strategy, StrategyKind
from trainer.strategies.fsdp import FSDP
from trainer.world import World, random_state, set_random_state

# torch 2.11, which `benchmarks.gpu` also supports, has only the older name of the option.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS_IN_FORWARD: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class DDP(StrategyKind):
    """DDP: every rank stores a copy of the backbone."""

    keeps_memory_format: ClassVar[bool] = True

    kind: Literal["ddp"] = "ddp"

    def start(self, backbone: nn.Module, world: World) -> Strategy:
        return DDPStrategy(backbone)

    @property
    def sharding(self) -> Sharding:
        return Sharding(bucket=sys.maxsize, keeps_bucket=True)  # buckets for all gradients

    def smaller(self) -> StrategyKind:
        return FSDP()


class DDPStrategy(Strategy):
    """torch's DistributedDataParallel with a hook that sums gradients instead of averaging them.

    DDP rebuilds its buckets after the first backward, and the rounding of the sums depends on the
    position of a gradient in its bucket. Every process therefore runs a warmup pass before its
    first step. Otherwise, a resumed run would not be bitwise identical to an uninterrupted one.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self._wrapper = DistributedDataParallel(backbone, **_NO_BUFFERS_IN_FORWARD)
        self._wrapper.register_comm_hook(None, sum_gradients)
        self._has_warmed_up = False

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(inputs)
        if not self._has_warmed_up:
            self._has_warmed_up = True
            self._warm_up(inputs)
        # no_sync must surround the forward pass, not the backward pass, because DDP prepares its
        # reducer in forward.
        context: AbstractContextManager[None] = nullcontext() if last else self._wrapper.no_sync()
        with context:
            features: Tensor = self._wrapper(inputs)
        return features

    def close(self) -> None:
        del self._wrapper

    def _warm_up(self, inputs: dict[str, Tensor]) -> None:
        """Run a forward and a backward pass whose only lasting effect is the layout of the
        buckets: gradients, buffers and random state are reset."""
        device = self.parameters[0].device
        buffers = BufferCopies(self.backbone)
        drawn = random_state(device)
        features = self._wrapper(inputs)
        features.backward(torch.zeros_like(features))
        set_random_state(drawn, device)
        for parameter in self.parameters:
            parameter.grad = None
        buffers.restore()
