"""A world of one rank with process groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.world import World


@contextmanager
def world_of_one_rank(device: torch.device) -> Iterator[World]:
    """Open a world of one rank with process groups, in which every collective is called.

    Use it in a process that exits afterwards. The groups are not destroyed, because that can abort
    a process in which other objects still refer to them.
    """
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("data", "class"))
    yield World(0, 1, 0, 1, device, mesh)
