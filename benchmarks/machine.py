"""A one-line description of the machine for benchmark reports."""

import os
import platform
from pathlib import Path

import torch


def machine() -> str:
    """Return the hardware, its load and the torch version, as the header of a report."""
    return (
        f"{hardware()}, load {os.getloadavg()[0]:.1f} at the start; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def hardware() -> str:
    """Return the processor, its number of cores, and the GPU if there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}"
