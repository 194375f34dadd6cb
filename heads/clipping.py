"""Clipping of the gradients of a backbone and its class-sharded heads by one norm."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from heads.collectives import all_reduce_sum
from heads.dtensors import local
from heads.gradients import squared_norm
from heads.head import ClassHead


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], head: ClassHead | Iterable[ClassHead], max_norm: float | Tensor
) -> Tensor:
    """Clip the norm of all gradients of `parameters` and of one or more heads to `max_norm`, and
    return the norm before clipping, a float64 scalar that is the same on every rank (collective).

    `torch.nn.utils.clip_grad_norm_` would use only this rank's class rows, so that the ranks scale
    the gradient of the backbone differently. `parameters` are those of the backbone, replicated on
    every rank or DTensors (FSDP2). Parameters of the heads among them are counted once.

    Raises RuntimeError for a head with `FusedSGD`, unless it is `deferred` and `needs_norm`.
    """
    heads = [head] if isinstance(head, ClassHead) else list(head)
    for each in heads:
        update = each.row_update
        if update is not None and not (update.deferred and update.needs_norm):
            raise RuntimeError(
                "FusedSGD cannot clip the gradient of the class rows: use "
                "FusedSGD(deferred=True, needs_norm=True)"
            )
    of_heads = {id(each) for one in heads for each in one.parameters()}
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in given if p.grad is not None and id(p) not in of_heads]
    total = torch.stack([one.squared_gradient_norm() for one in heads]).sum()
    sharded: dict[Any, list[Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        sharded.setdefault(layout, []).append(local(grad))
    for layout, tensors in sharded.items():
        squares = squared_norm(tensors, total.device)
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                if not placement.is_replicate():  # `is_shard` is false for strided shards
                    all_reduce_sum(squares, mesh.get_group(dim))
        total += squares
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    if grads:
        torch._foreach_mul_([local(grad) for grad in grads], factor)
    for one in heads:
        one.scale_gradients(factor)
    return norm
