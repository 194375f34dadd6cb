"""The squared norm of gradients; head and backbone add theirs up before clipping."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
