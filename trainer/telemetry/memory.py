"""Memory that a rank holds, in bytes by kind."""

from typing import Literal

import psutil
import torch

Kind = Literal["resident", "device_allocated", "device_reserved", "device_peak"]


def memory_bytes(device: torch.device) -> dict[Kind, int]:
    """`resident`: of this process in the machine's memory. On CUDA also what tensors take on the
    device, what torch keeps of it, and the most that tensors ever took."""
    held: dict[Kind, int] = {"resident": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        held["device_allocated"] = torch.cuda.memory_allocated(device)
        held["device_reserved"] = torch.cuda.memory_reserved(device)
        held["device_peak"] = torch.cuda.max_memory_allocated(device)
    return held


def scarce(held: dict[Kind, int]) -> int:
    """Of these the one that runs out first: the device's where there is one."""
    return held.get("device_reserved", held["resident"])
