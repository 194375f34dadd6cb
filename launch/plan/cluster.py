"""The cluster of a plan: its machines by name, which ranks share a node, the time of collectives.

GPUs have the rates of their data sheets, the CPU of this machine is measured. Rank r is on node
r // gpus. Class groups are contiguous ranks, data groups are ranks a class group apart, as in
`trainer/world.py`.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from trainer.devices import DEVICES
from trainer.strategies.cost import Collective, Group, Operation

# What NCCL takes for a small collective: of the order that its own tests report, assumed here.
_NODE_SECONDS = 15e-6
_ACROSS_SECONDS = 40e-6
_BITS = 8
# Of a network adapter a GPU, as in the makers' own servers of eight: assumed, --link-gbps says it.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400}
_OTHER_GBPS = 100
_LOOPBACK = 2e9
_SIDE = 768
_COPIED = 1 << 26


@dataclass(frozen=True)
class Machine:
    """One GPU (or CPU process) and its links; rates per second, from the data sheet.

    `flops` are those of dense matrices by arithmetic (fp32, tf32, bf16, fp16). `link` is what a GPU
    sends within its node, `network` what it sends to other nodes, in bytes.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory: int
    bandwidth: float
    flops: dict[str, float]
    link: float
    network: float


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `gpus` ranks each; `class_ranks` in a row share the classes."""

    machine: Machine
    nodes: int
    gpus: int
    class_ranks: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def data_ranks(self) -> int:
        """Class groups: ranks along `data`."""
        return self.ranks // self.class_ranks

    def size(self, group: Group) -> int:
        """Ranks of a group."""
        return {"class": self.class_ranks, "data": self.data_ranks, "world": self.ranks}[group]

    def crosses_nodes(self, group: Group) -> bool:
        """Whether any group of this kind has ranks on two nodes."""
        if self.nodes == 1 or self.size(group) == 1:
            return False
        if group == "class":
            return self.gpus % self.class_ranks != 0
        return True

    def latency(self, group: Group) -> float:
        """Seconds until a collective of nothing is through."""
        return _ACROSS_SECONDS if self.crosses_nodes(group) else _NODE_SECONDS

    def bytes_per_second(self, group: Group) -> float:
        """What a rank sends in a ring over the group: the slowest link sets it."""
        link, network = self.machine.link, self.machine.network
        return min(link, network) if self.crosses_nodes(group) else link

    def sent(self, collective: Collective) -> float:
        """Bytes that a rank sends with the ring algorithm, which NCCL and gloo use."""
        return collective.total * _ring_share(collective.operation, self.size(collective.group))

    def seconds(self, collective: Collective) -> float:
        waiting = collective.calls * collective.messages * self.latency(collective.group)
        return waiting + self.sent(collective) / self.bytes_per_second(collective.group)

    def nontrivial(self, collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        """Those that send bytes and whose group has more than one rank."""
        return tuple(c for c in collectives if c.total and self.size(c.group) > 1)


def _ring_share(operation: Operation, ranks: int) -> float:
    """Bytes sent, relative to those of the tensor (Patarasu and Yuan 2009 for all-reduce)."""
    if ranks == 1:
        return 0.0
    if operation in ("broadcast", "reduce"):
        return 1.0  # a chain: every rank but the last forwards the whole tensor
    share = (ranks - 1) / ranks
    return 2 * share if operation == "all_reduce" else share


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
