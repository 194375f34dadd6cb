"""Steps whose outcome is decided on the device, so that the host never waits for the device.

A step must not change anything if its loss or its gradient norm is not finite. If the host decided
whether to skip a step, it would have to wait for every step, and the device would be idle while the
host launches the next one. Instead, the device computes a flag. If it is set, the weights, the
moments, the moving average and the batch norm statistics keep their values, and an fp16 overflow
lowers the loss scale. The host launches step t + 1, reads the results of step t, and then logs them
or reports an error:

    host     launch t | read t - 1 | launch t + 1 | read t | launch t + 2 | …
    device        step t - 1       |        step t        |       step t + 1 …

Before each checkpoint and evaluation, and at the end of the run, the host reads the results of the
newest step.

If a rank is lost, the collectives of the other ranks never end on their devices. A host that waits
for a step therefore also checks the connections to the other ranks (`trainer/steps/agreement.py`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from heads.engine.inputs import non_finite_rows

_POLL_SECONDS = 1e-4


@dataclass(frozen=True)
class PartLoss:
    """The loss of a micro-batch on the device, and the rows of its features that are not finite.

    `broken_rows` are the `non_finite_rows` of the `num_rows` rows passed to the head.
    """

    loss: Tensor
    num_rows: int
    broken_rows: Tensor

    @classmethod
    def of(cls, loss: Tensor, features: Tensor) -> "PartLoss":
        return cls(loss, len(features), non_finite_rows(features))


@dataclass(frozen=True)
class Numbers:
    """The loss and gradient norm of a step, on the host.

    `skipped`: the step changed nothing, because the loss or the gradient norm is not finite.
    `reason` says why, and is empty for other steps.
    """

    loss: float
    gradient_norm: float
    skipped: bool = False
    reason: str = ""


class Event(Protocol):
    """The part of `torch.cuda.Event` that a host needs in order to wait."""

    def query(self) -> bool:
        """Return whether the device has completed all work recorded by the event."""


class DeferredNumbers:
    """The `loss` of a step, its gradient `norm` and whether it must be `skipped`: scalars on the
    device that are copied to the host without waiting.

    `part_weights` contains the sum of the row weights of each micro-batch over all ranks, or is
    None if every row has the weight 1. `event` completes when the copy is complete; it is None if
    the tensors are on the CPU.
    """

    event: Event | None = None

    def __init__(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        parts: Sequence[PartLoss],
        part_weights: Tensor | None = None,
    ) -> None:
        self.step, self.parts, self.loss, self.norm = step, parts, loss, norm
        is_finite = loss.isfinite() & norm.isfinite()
        self.skipped = ~is_finite
        weight = torch.ones_like(norm) if part_weights is None else part_weights.sum().double()
        rows = [torch.cat([part.loss.double().reshape(1), part.broken_rows]) for part in parts]
        packed = torch.cat([torch.stack([loss.double(), norm, is_finite.double(), weight]), *rows])
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            self.event = copied
        else:
            self._host = packed

    def read(self, check: Callable[[], None]) -> tuple[float, float, bool]:
        """Wait for this step, but not for later ones. Return the loss, the gradient norm and
        whether the step was skipped.

        While waiting, this calls `check` repeatedly, which must raise an error if the step can
        never complete.
        """
        while self.event is not None and not self.event.query():
            check()
            time.sleep(_POLL_SECONDS)
        loss, norm, is_finite, *_ = self._host.tolist()
        return loss, norm, not is_finite

    def total_weight(self) -> float:
        """Return the sum of all row weights of the global batch. Call this after `read`."""
        return float(self._host[3])

    def broken_part(self) -> tuple[int, int, Tensor] | None:
        """Return the index, the number of rows and the `non_finite_rows` of the first micro-batch
        whose loss is NaN, if there is one. Call this after `read`."""
        rows = self._host[4:].view(len(self.parts), -1)
        broken = rows[:, 0].isnan().nonzero().flatten().tolist()
        if not broken:
            return None
        index = broken[0]
        return index, self.parts[index].num_rows, rows[index, 1:].long()


def accepts_flag(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads `grad_scale` and `found_inf`, as torch's fused optimizers
    do and `torch.amp.GradScaler` expects."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def create_momentum(optimizer: Optimizer | None) -> None:
    """Initialize the momentum of torch's SGD to zero. The result of the first step stays the same.

    Without this, fused SGD leaves the momentum uninitialized if the first step is skipped (torch
    2.13).
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@contextmanager
def flagged(
    optimizers: Sequence[Optimizer], divisor: Tensor | None, skipped: Tensor
) -> Iterator[None]:
    """Inside the context, steps of `optimizers` divide the gradients by `divisor` and change
    nothing if `skipped` is true."""
    flags = {"found_inf": skipped.to(torch.float32)}
    if divisor is not None:
        flags["grad_scale"] = divisor
    for optimizer, name in product(optimizers, flags):
        setattr(optimizer, name, flags[name])
    try:
        yield
    finally:
        for optimizer, name in product(optimizers, flags):
            delattr(optimizer, name)
