"""Checks of torch, the CUDA devices and their driver, and peer access between the devices."""

import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.check import Finding, Workload, error, in_gib, ok, warning

_DRIVER = Path("/proc/driver/nvidia/version")
_USED_SHARE = 0.1  # share of a device's memory in use before training starts


def torch_build(workload: Workload) -> Iterator[Finding]:
    """Report the version of torch and its CUDA version, and check that it can use the GPUs."""
    try:
        import torch
    except (ImportError, OSError) as failure:
        remedy = "reinstall torch: pip install --force-reinstall torch"
        yield error("torch", f"cannot be imported: {str(failure).splitlines()[0]}", remedy)
        return
    if torch.version.cuda is None:
        built = "for the CPU"
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        built = f"for CUDA {torch.version.cuda}, NCCL {nccl}"
    yield ok("torch", f"{torch.__version__}, built {built}")
    if not torch.cuda.is_available() and _DRIVER.exists():
        yield error(
            "torch",
            f"NVIDIA driver {driver_version()} is loaded, but torch cannot use it{_why_not()}",
            "install a torch build for a CUDA version that this driver supports (pytorch.org), or "
            "install a newer driver; in a container, enable GPU access (docker run --gpus all)",
        )


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module, such as `550.54.15`."""
    found = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER.read_text(encoding="utf-8"))
    return found[1] if found else "of an unknown version"


def _why_not() -> str:
    import torch

    if torch.version.cuda is None:
        return ": this build of torch supports only CPUs"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as failure:
        return f": {str(failure).splitlines()[0]}"
    return ""


def devices(workload: Workload) -> Iterator[Finding]:
    """Check the memory of the visible GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        yield ok("devices", "no GPU: training runs on the CPU, with gloo")
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        line = f"GPU {index}: {properties.name}, {in_gib(free)} of {in_gib(total)} free"
        if total - free > _USED_SHARE * total:
            yield warning("devices", line, "run nvidia-smi to find the processes that use the rest")
        else:
            yield ok("devices", line)
    if _DRIVER.exists():
        yield ok("devices", f"NVIDIA driver {driver_version()}")


def peer_access(workload: Workload) -> Iterator[Finding]:
    """Check whether the GPUs can access each other's memory directly, bypassing main memory."""
    import torch

    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(i)]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        few = ", ".join(f"{j}-{i}" for i, j in without[:4])
        more = f" and {len(without) - 4} more" if len(without) > 4 else ""
        yield warning(
            "peer access",
            f"missing between GPUs {few}{more} (of {len(pairs)} pairs): traffic goes through main "
            "memory",
            "run nvidia-smi topo -m to see the links; in a virtual machine, disable PCIe access "
            "control (ACS)",
        )
    elif pairs:
        yield ok("peer access", f"between all {count} GPUs")
