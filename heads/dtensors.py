"""Tensors whose rows are dealt out to the ranks of one mesh axis, and what a rank holds of them."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def sharded_rows(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """This rank's `rows` of a tensor of `shape`, as `Shard(0)` over a mesh of one axis."""
    # Shape and stride are given: from uneven shards alone they are inferred wrongly.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=shape, stride=stride)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All ranks' rows, on every rank (collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
