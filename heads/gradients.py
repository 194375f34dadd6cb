"""Gradients of a head and of the module below it, over ranks: their squared norm for clipping, and
hooks that make DDP and FSDP2 sum them, where they would average.

A `ClassHead` returns the loss of the global batch, so each rank's gradient of the backbone is its
part of the whole gradient, and the parts add up to it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# On the CPU torch computes a float32 norm with a few running totals: over 1e8 numbers its square is
# 2% too low, over pieces of this size 3e-7.
_PIECE = 1 << 16


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all numbers of `tensors`, a float64 scalar on `device`.

    Squares are summed in at least float32, in float64 for float64 tensors. The result always has
    the same dtype, so that ranks can add theirs up even if one of them has no tensors.
    """
    pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.reshape(-1).split(_PIECE) if wide.device.type == "cpu" else (wide,)


def sum_gradients(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook of `DistributedDataParallel` that sums over `group`, None: the world.

    >>> wrapped.register_comm_hook(None, sum_gradients)
    """
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def sum_sharded_gradients(module: nn.Module) -> None:
    """Make every part of `module` that `fully_shard` wraps sum its gradients."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
