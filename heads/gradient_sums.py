"""Makes DDP and FSDP2 sum gradients over ranks, where they would average.

A `ClassHead` returns the loss of the global batch, so each rank's gradient of the backbone is its
part of the whole gradient, and the parts add up to it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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
