"""What a measurement was made on, in one line."""

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """What the numbers were measured on, and what else it was doing."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    return (
        f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
