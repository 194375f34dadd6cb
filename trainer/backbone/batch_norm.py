"""Batch norm modes: statistics are computed over the rows of all ranks, computed on each rank
separately, or frozen.

Unlike torch's SyncBatchNorm, the synchronized batch norm in this module supports CPUs. The module
also contains functions that copy and restore buffers, such as batch norm statistics.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from heads.collectives import all_gather_equal, all_reduce_sum, broadcast, hook_forward


class GroupBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that computes its training statistics over the rows of all ranks.

    Up to rounding, the result is the same as in a single process with the full batch. A rank may
    have zero rows.
    """

    group: ProcessGroup | None = None

    @torch.compiler.disable  # it contains collectives and a count that is read on the host
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        normalized, mean, variance, count = _GroupNormalize.apply(
            input, self.weight, self.bias, self.eps, self.group
        )
        if self.track_running_stats:
            self._update_running(mean, variance, float(count))
        return normalized

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), momentum)


class _GroupNormalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _moments(x, group)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.group, ctx.count = group, float(count)
        ctx.mark_non_differentiable(mean, variance, count)
        # torch's kernel in evaluation mode is the fastest way to scale and shift.
        normalized = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        return normalized, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        grad = grad.to(inverse.dtype)
        centered = (x.to(inverse.dtype) - _per_channel(mean)) * _per_channel(inverse)
        by_bias = grad.sum((0, 2, 3))
        by_weight = (grad * centered).sum((0, 2, 3))
        sums = all_reduce_sum(torch.cat([by_bias, by_weight]), ctx.group) / ctx.count
        mean_grad, mean_product = sums.chunk(2)
        by_input = grad - _per_channel(mean_grad) - centered * _per_channel(mean_product)
        by_input *= _per_channel(weight.to(inverse.dtype) * inverse)
        # The gradients of weight and bias stay local, because the strategy sums them over ranks
        # like all other gradients.
        return by_input.to(x.dtype), by_weight, by_bias, None, None


def _moments(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean [C], biased variance [C] and row count over all ranks (collective).

    Merges the moments of the ranks as described by Chan, Golub and LeVeque (1979). Summing squares
    instead would lose precision if the mean is large.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    count = x.numel() // x.shape[1]
    if count:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    else:
        variance = mean = x.new_zeros(x.shape[1])
    packed = torch.stack([mean, variance, torch.full_like(mean, count)])
    means, variances, counts = torch.stack(all_gather_equal(packed, group), dim=1)
    total = counts.sum(0)
    share = counts / total
    overall = (share * means).sum(0)
    spread = (share * (variances + (means - overall).square())).sum(0)
    return overall, spread, total[0]


def _per_channel(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that always uses its stored statistics; scale and shift are trained."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        del mode  # ignored, because `train()` is called on entire models
        super().train(False)
        return self


@torch.no_grad()
def follow_first_rank(module: nn.Module, group: ProcessGroup | None) -> None:
    """Copy the statistics of local batch norms from the first rank to all ranks, in one message
    (collective). All ranks then have the same model, which is the one in the checkpoint.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if group is None or not buffers:
        return
    packed = broadcast(torch.cat([buffer.flatten() for buffer in buffers]), group)
    for buffer, values in zip(
        buffers, packed.split([buffer.numel() for buffer in buffers]), strict=True
    ):
        buffer.copy_(values.view_as(buffer))


def apply_batch_norm_mode(
    module: nn.Module,
    mode: Literal["sync", "local", "frozen"],
    group: ProcessGroup | None,
    device: torch.device,
) -> None:
    """Make the batch norms of a module synchronize their statistics over `group`, use local
    statistics, or freeze their statistics.
    """
    layers = [child for child in module.modules() if type(child) is nn.BatchNorm2d]
    match mode:
        case "sync" if group is not None and device.type == "cuda":
            nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
            for child in module.modules():
                if isinstance(child, nn.SyncBatchNorm):
                    hook_forward(child, "all_gather")
        case "sync" if group is not None:
            for layer in layers:
                layer.__class__ = GroupBatchNorm2d
                layer.group = group  # type: ignore[assignment]
        case "frozen":
            for layer in layers:
                layer.__class__ = FrozenBatchNorm2d
                layer.train(False)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are part of a module's state dict, by name."""
    weights = {name for name, _ in module.named_parameters()}
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name not in weights}


class BufferCopies:
    """Copies of a module's buffers, such as batch norm statistics, to restore them later.

    Buffers of the same dtype are packed into one tensor, because a model has hundreds of them.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = list(module.buffers())
        self._groups = [
            [buffer for buffer in buffers if buffer.dtype == dtype]
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers)
        ]
        self._copies = [_packed(group) for group in self._groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        for group, copy in zip(self._groups, self._copies, strict=True):
            _unpack(copy, group)

    @torch.no_grad()
    def restore_where(self, skipped: Tensor) -> None:
        """Restore the buffers if `skipped`, a scalar on their device, is true."""
        for group, copy in zip(self._groups, self._copies, strict=True):
            _unpack(torch.where(skipped, copy, _packed(group)), group)


def _packed(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])


def _unpack(values: Tensor, buffers: Sequence[Tensor]) -> None:
    pieces = values.split([buffer.numel() for buffer in buffers])
    views = [piece.view_as(buffer) for piece, buffer in zip(pieces, buffers, strict=True)]
    torch._foreach_copy_(list(buffers), views)
