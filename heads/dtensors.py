"""DTensors whose rows are sharded over one mesh axis."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def sharded_rows(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Wrap `rows`, this rank's part of a tensor of `shape`, as a `Shard(0)` DTensor (1-D mesh)."""
    # Pass shape and stride, because `from_local` infers them incorrectly from uneven shards.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], shape=shape, stride=stride)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all ranks' rows of a DTensor (collective). Any other tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
