"""DDP: every rank holds the whole backbone and sums the gradients, bucket by bucket."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from trainer.backbone import Backbone
from trainer.strategies.base import Strategy


class DDP(Strategy):
    """torch's DistributedDataParallel, summing where it would average."""

    def __init__(self, backbone: Backbone, *, local_buffers: bool) -> None:
        super().__init__(backbone)
        # Synchronised buffers are equal on all ranks already; local ones follow rank 0.
        self._wrapper = DistributedDataParallel(backbone, forward_sync_buffers=local_buffers)
        self._wrapper.register_comm_hook(None, _sum_gradients)

    def forward(self, inputs: dict[str, Tensor], *, last: bool = True) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(inputs)
        # Whether backward sums is settled here: the reducer is prepared in forward.
        context: AbstractContextManager[None] = nullcontext() if last else self._wrapper.no_sync()
        with context:
            features: Tensor = self._wrapper(inputs)
        return features

    def close(self) -> None:
        del self._wrapper


def _sum_gradients(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
