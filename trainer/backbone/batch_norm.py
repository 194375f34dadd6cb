"""Batch norm modes: statistics are computed over the rows of all ranks, computed on each rank
separately, or frozen.

The module also contains functions that copy and restore buffers, such as batch norm statistics.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from heads.collectives import all_gather_equal, all_reduce_sum, broadcast

# The layers that a mode changes. Their subclasses are not changed, because they may compute
# something else.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

# Shape legend: R ranks, C channels. Activations are [b, C, ...].


class _AnyBatchNorm(nn.BatchNorm2d):
    # For activations with any number of spatial dimensions.
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch norm received an input of shape {list(input.shape)}: pass at least two "
                "dimensions, [b, C, ...]"
            )


class GroupBatchNorm(_AnyBatchNorm):
    """Batch norm that computes its training statistics over the rows of all ranks.

    Up to rounding, the result is the same as in a single process with the full batch. A rank may
    have zero rows. Unlike torch's SyncBatchNorm, which selects the ranks that have rows, this layer
    never makes the host wait for the device (pytorch#78549), and it supports CPUs.
    """

    group: ProcessGroup | None = None

    @torch.compiler.disable  # it contains collectives
    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        normalized, mean, variance, counts = _GroupNormalize.apply(
            input, self.weight, self.bias, self.eps, self.group
        )
        if self.track_running_stats:
            self._update_running(mean, variance, counts.sum())
        return normalized

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        # Without a momentum, the running statistics are the mean over all batches.
        weight: Tensor | float = (
            (1 / self.num_batches_tracked).to(mean.dtype)
            if self.momentum is None
            else self.momentum
        )
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), weight)


class _GroupNormalize(torch.autograd.Function):
    """Returns the normalized activations, the mean [C] and biased variance [C] over all ranks, and
    the number of values per channel on each rank [R], all on the device.

    On CUDA, torch's batch norm kernels read and write the activations as often as in SyncBatchNorm:
    three passes in forward and five in backward, without a copy in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = _dense(x)
        mean, variance, count = _moments(x)
        mean, variance, counts = _merged(mean, variance, count, group)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, counts)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, counts)
        # torch's kernel in evaluation mode is the fastest way to scale and shift.
        normalized = F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)
        return normalized, mean, variance, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        differentiate = _differentiate_on_cuda if grad.is_cuda else _differentiate
        by_input, by_weight, by_bias = differentiate(ctx, grad)
        # The gradients of weight and bias stay local, because the strategy sums them over ranks
        # like all other gradients.
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return (
            by_input,
            by_weight if needs_weight else None,
            by_bias if needs_bias else None,
            None,
            None,
        )


def _moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the mean [C] and biased variance [C] of this rank's rows, and the number of values per
    channel. For zero rows, they are 0."""
    count = x.numel() // x.shape[1]
    if not count:
        zeros = x.new_zeros(x.shape[1], dtype=_dtype(x))
        return zeros, zeros, 0
    if x.is_cuda:
        # Without running statistics to update, this kernel only computes the moments. Unlike
        # `var_mean`, it returns float32 for 16-bit activations.
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        variance, mean = torch.var_mean(x.to(_dtype(x)), _rows_of(x), correction=0)
    return mean, variance, count


def _merged(
    mean: Tensor, variance: Tensor, count: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean [C] and biased variance [C] over all ranks, and the counts of the ranks [R]
    (collective).

    Merges the moments of the ranks as described by Chan, Golub and LeVeque (1979). Summing squares
    instead would lose precision if the mean is large. A rank with zero rows has the weight 0.
    """
    packed = torch.cat([mean, variance, mean.new_full((1,), count)])
    num_channels = len(mean)
    gathered = torch.stack(all_gather_equal(packed, group))
    means, variances, counts = gathered.split([num_channels, num_channels, 1], dim=1)
    shares = counts / counts.sum()
    overall = (shares * means).sum(0)
    spread = (shares * (variances + (means - overall).square())).sum(0)
    return overall, spread, counts.flatten()


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the input, and this rank's terms of the gradients of weight and bias
    (collective)."""
    x, weight, mean, inverse, counts = ctx.saved_tensors
    grad = grad.to(inverse.dtype)
    centered = (x.to(inverse.dtype) - _per_channel(mean, x)) * _per_channel(inverse, x)
    by_bias = grad.sum(_rows_of(x))
    by_weight = (grad * centered).sum(_rows_of(x))
    sums = all_reduce_sum(torch.cat([by_bias, by_weight]), ctx.group) / counts.sum()
    mean_grad, mean_product = sums.chunk(2)
    by_input = grad - _per_channel(mean_grad, x) - centered * _per_channel(mean_product, x)
    scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
    by_input *= _per_channel(scale, x)
    return by_input.to(x.dtype), by_weight, by_bias


def _differentiate_on_cuda(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as `_differentiate` with the kernels of SyncBatchNorm."""
    x, weight, mean, inverse, counts = ctx.saved_tensors
    by_bias = product = torch.zeros_like(mean)
    if x.numel():
        grad = _dense(grad)
        # `product` is the sum of `grad` times `x - mean`.
        by_bias, product, *_ = torch.batch_norm_backward_reduce(
            grad, x, mean, inverse, weight, True, False, False
        )
    # `cat` copies the sums, because the reduction overwrites its input.
    sums = all_reduce_sum(torch.cat([by_bias, product]), ctx.group)
    by_input = torch.empty_like(x)
    if x.numel():
        sum_grad, sum_product = sums.chunk(2)
        by_input = torch.batch_norm_backward_elemt(
            grad, x, mean, inverse, weight, sum_grad, sum_product, counts.int()
        )
    return by_input, product * inverse, by_bias


def _dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics of `x`: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _rows_of(x: Tensor) -> list[int]:
    """Return all dimensions of `x` except the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (x.dim() - 2))


def _dense(x: Tensor) -> Tensor:
    """Return `x` in one of the two memory formats for which the kernels are fast."""
    is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x if is_channels_last else x.contiguous()


class FrozenBatchNorm(_AnyBatchNorm):
    """Batch norm that always uses its stored statistics; scale and shift are trained."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
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
    _unpack(broadcast(_packed(buffers), group), buffers)


def apply_batch_norm_mode(
    module: nn.Module, mode: Literal["sync", "local", "frozen"], group: ProcessGroup | None
) -> None:
    """Make the batch norms of a module synchronize their statistics over `group`, use local
    statistics, or freeze their statistics.
    """
    layers = [child for child in module.modules() if type(child) in BATCH_NORMS]
    match mode:
        case "sync" if group is not None:
            for layer in layers:
                layer.__class__ = GroupBatchNorm
                layer.group = group  # type: ignore[assignment]
        case "frozen":
            for layer in layers:
                layer.__class__ = FrozenBatchNorm
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
