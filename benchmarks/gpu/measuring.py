"""Measures time and peak memory on a GPU or on the CPU."""

import gc
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.timing import resident, restart_high_water_mark, take_turns


def measure(
    contenders: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float
) -> dict[str, np.ndarray]:
    """Time contenders in turn for about `seconds`. Return the seconds of each round."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return take_turns(contenders, title="measuring", seconds=seconds, rounds=20, clock=clock)


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


def free(device: torch.device) -> None:
    """Return the memory of freed tensors to the device, for contenders that need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
