"""The cluster of a plan: machines by name, the node of each rank, and the cost of collectives.

GPU rates come from data sheets; the CPU of this machine is measured. Rank r is on node r // gpus.
As in `trainer/world.py`, the ranks of a class group are contiguous, and neighboring ranks of a data
group are one class group apart.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from heads.engine.block_size import Processor
from launch.plan.operation_timer import OperationTimer
from trainer.devices import DEVICES
from trainer.strategies.cost import Collective, Group, Operation

# Assumed latency of a small NCCL collective, of the order of magnitude that nccl-tests reports.
_NODE_SECONDS = 15e-6
_ACROSS_SECONDS = 40e-6
# Assumed times: the time that the host needs to launch a kernel, and the time for which a device is
# idle after the host has waited for it.
_LAUNCH_SECONDS = 5e-6
_WAIT_SECONDS = 20e-6
_BITS = 8
# Assumes one network adapter per GPU, as in the vendors' own servers with eight GPUs. --link-gbps
# overrides these rates.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400}
_OTHER_GBPS = 100
_LOOPBACK = 2e9
_SIDE = 768
_COPIED = 1 << 26


@dataclass(frozen=True)
class Machine:
    """One GPU (or CPU process) and its links, with rates per second from the data sheet.

    flops: FLOPs of dense matrix products, by number format (fp32, tf32, bf16, fp16). link: bytes
    that a GPU sends within its node; network: bytes that it sends to other nodes. num_sms: number
    of streaming multiprocessors of a GPU; capability and cache_bytes: see `trainer/devices.py`.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory: int
    bandwidth: float
    flops: dict[str, float]
    link: float
    network: float
    num_sms: int = 0
    capability: int = 0
    cache_bytes: int = 0
    launch_seconds: float = _LAUNCH_SECONDS
    wait_seconds: float = _WAIT_SECONDS
    timer: OperationTimer | None = None

    @property
    def processor(self) -> Processor:
        return Processor(self.kind, self.memory, self.num_sms)


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes, with one rank per GPU.

    The classes are sharded across each group of `class_ranks` consecutive ranks, and the backbone
    across each group of `shard_ranks` (None: all ranks).
    """

    machine: Machine
    nodes: int
    gpus: int
    class_ranks: int
    shard_ranks: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def data_ranks(self) -> int:
        """Number of class groups, which is the size of the `data` axis."""
        return self.ranks // self.class_ranks

    def size(self, group: Group) -> int:
        """Return the number of ranks in a group."""
        shard = self.shard_ranks or self.ranks
        sizes: dict[Group, int] = {
            "class": self.class_ranks,
            "data": self.data_ranks,
            "shard": shard,
            "replicate": self.ranks // shard,
            "world": self.ranks,
        }
        return sizes[group]

    def crosses_nodes(self, group: Group) -> bool:
        """Return whether any group of this kind spans more than one node."""
        if self.nodes == 1 or self.size(group) == 1:
            return False
        if group in ("class", "shard"):  # consecutive ranks
            return self.gpus % self.size(group) != 0
        return True

    def latency(self, group: Group) -> float:
        """Return the duration of a collective that sends no data, in seconds."""
        return _ACROSS_SECONDS if self.crosses_nodes(group) else _NODE_SECONDS

    def bytes_per_second(self, group: Group) -> float:
        """Return the send rate of a rank in a ring over the group, limited by the slowest link."""
        link, network = self.machine.link, self.machine.network
        return min(link, network) if self.crosses_nodes(group) else link

    def sent(self, collective: Collective) -> float:
        """Return the bytes that a rank sends with the ring algorithm, which NCCL and gloo use."""
        return collective.total * _ring_share(collective.operation, self.size(collective.group))

    def seconds(self, collective: Collective) -> float:
        waiting = collective.calls * collective.messages * self.latency(collective.group)
        return waiting + self.sent(collective) / self.bytes_per_second(collective.group)

    def nontrivial(self, collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        """Return the collectives that send data: those with a size above 0 and several ranks."""
        return tuple(c for c in collectives if c.total and self.size(c.group) > 1)


def _ring_share(operation: Operation, ranks: int) -> float:
    """Return the bytes sent divided by the tensor size (all-reduce: Patarasu and Yuan 2009)."""
    if ranks == 1:
        return 0.0
    if operation in ("broadcast", "reduce"):
        return 1.0  # pipelined along a chain: every rank except the last forwards the full tensor
    share = (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


def machine_named(name: str, *, link_gbps: float | None, ranks_per_node: int) -> Machine:
    """Return the machine called `name`; `link_gbps` overrides each GPU's rate to other nodes.

    Raises ValueError for an unknown name.
    """
    name = name.lower()
    if name == "cpu":
        return _this_cpu(ranks_per_node, link_gbps)
    device = DEVICES.get(name)
    if device is None:
        raise ValueError(f"--gpu {name} is unknown: choose one of {', '.join(DEVICES)}, or cpu")
    gbps = link_gbps or _NETWORK_GBPS.get(name.partition("-")[0], _OTHER_GBPS)
    return Machine(
        name=name,
        kind="cuda",
        memory=device.memory_bytes,
        bandwidth=device.memory_bytes_per_second,
        flops={precision: float(peak) for precision, peak in device.peaks.items()},
        link=device.link_bytes_per_second,
        network=gbps * 1e9 / _BITS,
        num_sms=device.num_sms,
        capability=device.capability,
        cache_bytes=device.cache_bytes,
    )


def _this_cpu(ranks: int, link_gbps: float | None) -> Machine:
    """Measure this machine's CPU and memory, and divide them among its ranks."""
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
        launch_seconds=0.0,
        wait_seconds=0.0,
        timer=OperationTimer(max(1, torch.get_num_threads() // ranks)),
    )


def _fastest(work: object) -> float:
    assert callable(work)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
