"""One rank of a world whose other ranks do not exist: torch's fake process group replaces them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.world import World


@contextmanager
def fake_world(
    shape: tuple[int, int], *, rank: int = 0, local_size: int | None = None
) -> Iterator[World]:
    """Yield the world of a rank on CPUs. `shape` is the number of ranks along `data` and `class`;
    `local_size` is the number of ranks per machine (None: all)."""
    size, cpu = shape[0] * shape[1], torch.device("cpu")
    if size == 1:
        yield World(0, 1, 0, 1, cpu, None)
        return
    local_size = local_size or size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "class"))
        yield World(rank, size, rank % local_size, local_size, cpu, mesh)
    finally:
        dist.destroy_process_group()
