"""Measures time and peak memory, and opens a world of one rank, on a GPU or on the CPU."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peak_memory import resident, restart_high_water_mark
from benchmarks.timing import take_turns
from trainer.world import World


def measure(
    contenders: dict[str, Callable[[], object]], device: torch.device, *, seconds: float
) -> dict[str, dict[str, Any]]:
    """Time contenders in turn for about `seconds`. Return, for each of them, the median and the
    quartiles of its seconds, the number of rounds and the seconds of each round."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    found = take_turns(contenders, title="measuring", seconds=seconds, rounds=20, clock=clock)
    return {name: _summary(times) for name, times in found.items()}


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the memory that `work` allocates in addition to what is allocated now."""
    gc.collect()
    if device.type == "cpu":
        before = restart_high_water_mark()
        work()
        return resident("VmHWM") - before
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def allocated_bytes(device: torch.device) -> int:
    return resident("VmRSS") if device.type == "cpu" else torch.cuda.memory_allocated(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Return the memory of freed tensors to the device, for contenders that need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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


def _summary(times: np.ndarray) -> dict[str, Any]:
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75]).tolist()
    return {"seconds": middle, "quartiles": [low, high], "rounds": times.tolist()}
