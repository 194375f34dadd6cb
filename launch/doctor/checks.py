"""The list of checks, in the order in which they are reported."""

from collections.abc import Callable, Iterator

from launch.doctor import (
    collectives,
    devices,
    limits,
    network,
    software,
    storage,
)
from launch.doctor.check import Finding, Workload, error

Check = Callable[[Workload], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "python": software.python,
    "torch": devices.torch_build,
    "packages": software.packages,
    "torchvision": software.torchvision,
    "JPEG decoder": software.jpeg_decoder,
    "devices": devices.devices,
    "peer access": devices.peer_access,
    "memory": limits.memory,
    "CPUs": limits.cpus,
    "threads": limits.threads,
    "shared memory": limits.shared_memory,
    "open files": limits.open_files,
    "processes": limits.processes,
    "inputs": storage.inputs,
    "disk space": storage.disk_space,
    "run folder": storage.file_system,
    "host name": network.host_name,
    "gloo's interface": network.gloo_interface,
    "NCCL's interface": network.nccl_interface,
    "ports": network.ports,
    "peers": network.peers,
    "clock": network.clock,
    "variables": software.variables,
    "gloo": collectives.gloo,
    "NCCL": collectives.nccl,
}
# Checks that cannot run without torch.
_NEED_TORCH = {"devices", "peer access", "gloo", "NCCL"}


def examine(workload: Workload, starting: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks and yield their findings. Calls `starting` with the name of each check."""
    torch_works = True
    for name, check in CHECKS.items():
        if name in _NEED_TORCH and not torch_works:
            continue
        starting(name)
        try:
            for finding in check(workload):
                torch_works &= (finding.topic, finding.level) != ("torch", "error")
                yield finding
        except OSError as failure:
            remedy = "check the permissions of this process"
            yield error(name, f"the check failed: {failure}", remedy)
