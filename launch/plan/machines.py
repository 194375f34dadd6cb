"""The machines by name: GPUs from their data sheets, the CPU of this machine by a measurement."""

import os
import time

import psutil
import torch

from launch.plan.cluster import Machine
from trainer.devices import DEVICES

_BITS = 8
# Of a network adapter a GPU, as in the makers' own servers of eight: assumed, --link-gbps says it.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400}
_OTHER_GBPS = 100
_LOOPBACK = 2e9
_SIDE = 768
_COPIED = 1 << 26


def machine_named(name: str, *, link_gbps: float | None, ranks_a_node: int) -> Machine:
    """The machine `name` stands for; `link_gbps` is each GPU's rate to other nodes.

    Raises ValueError for a name that is not known.
    """
    name = name.lower()
    if name == "cpu":
        return _this_cpu(ranks_a_node, link_gbps)
    device = DEVICES.get(name)
    if device is None:
        raise ValueError(f"--gpu {name} is not known: choose one of {', '.join(DEVICES)}, or cpu")
    gbps = link_gbps or _NETWORK_GBPS.get(name.partition("-")[0], _OTHER_GBPS)
    return Machine(
        name=name,
        kind="cuda",
        memory=device.memory_bytes,
        bandwidth=device.memory_bytes_per_second,
        flops={precision: float(peak) for precision, peak in device.peaks.items()},
        link=device.link_bytes_per_second,
        network=gbps * 1e9 / _BITS,
    )


def _this_cpu(ranks: int, link_gbps: float | None) -> Machine:
    """This machine's cores and memory, shared out to its ranks."""
    matrix = torch.randn(_SIDE, _SIDE)
    product = _fastest(lambda: torch.mm(matrix, matrix))
    block = torch.zeros(_COPIED // 4)
    copy = _fastest(lambda: block.clone())
    flops = 2 * _SIDE**3 / product / ranks
    return Machine(
        name=f"cpu ({os.cpu_count()} cores)",
        kind="cpu",
        memory=psutil.virtual_memory().total // ranks,
        bandwidth=2 * _COPIED / copy / ranks,
        flops=dict.fromkeys(("fp32", "bf16", "fp16"), flops),
        link=_LOOPBACK / ranks,
        network=(link_gbps or _OTHER_GBPS) * 1e9 / _BITS / ranks,
    )


def _fastest(work: object) -> float:
    assert callable(work)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
