"""The cluster of a plan: the rates of a machine, the groups of ranks, and the cost of collectives.

GPU rates come from data sheets; those of this CPU are measured. Rank r is on node r // gpus. As in
`trainer/world.py`, the ranks of a class group are contiguous, and neighboring ranks of a data group
are one class group apart.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import psutil
import torch
from torch.nn import functional as F

from heads.engine.block_size import Processor
from launch.plan.devices import DEVICES
from trainer.backbone.trace import Kind

# `shard`: the ranks that share one copy of the backbone; `replicate`: those with the same piece.
Group = Literal["class", "data", "shard", "replicate", "world"]
Transfer = Literal["all_gather", "all_reduce", "reduce_scatter", "broadcast"]
Phase = Literal["forward", "head", "backward", "optimizer"]

BYTES_PER_GBIT = 1e9 / 8
# Assumed latency of a small NCCL collective, of the order of magnitude that nccl-tests reports.
_NODE_SECONDS = 15e-6
_ACROSS_SECONDS = 40e-6
# Assumes one network adapter per GPU, as in the vendors' own servers with eight GPUs. --link-gbps
# overrides these rates.
_NETWORK_GBPS = {"a100": 200, "h100": 400, "h200": 400, "b200": 400}
_OTHER_GBPS = 100
_LOOPBACK = 2e9
_COPIED = 1 << 26


@dataclass(frozen=True)
class Machine:
    """One GPU (or CPU process) and its links.

    flops: FLOPs per second of dense matrix products, by number format (fp32, tf32, bf16, fp16) and,
    if measured, of float32 convolutions. bandwidth: bytes per second of the memory. in_place: the
    same for memory that is already in use (None: equal); on CPUs, new memory causes page faults.
    link, network: bytes per second that a GPU sends within its node and to other nodes. num_sms:
    number of streaming multiprocessors of a GPU.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory: int
    bandwidth: float
    flops: dict[str, float]
    link: float
    network: float
    num_sms: int = 0
    in_place: float | None = None

    @property
    def processor(self) -> Processor:
        return Processor(self.kind, self.memory, self.num_sms)

    def peak(self, kind: Kind, *, precision: str, tf32: bool) -> float:
        """Return the FLOPs per second of products. cuDNN convolves in TF32 by default."""
        names = {"half": precision, "convolution": "tf32", "single": "tf32" if tf32 else "fp32"}
        name = kind if kind in self.flops else names.get(kind, "fp32")
        return self.flops.get(name, self.flops["fp32"])


class Collective(NamedTuple):
    """A collective that runs `calls` times per step, in `messages` messages per call.

    `bytes` counts the full tensor: the input of an all-reduce or reduce-scatter, or the output of
    an all-gather. `hidden` means that the collective overlaps with other work in its phase.
    """

    what: str
    operation: Transfer
    group: Group
    bytes: int
    phase: Phase
    calls: int = 1
    messages: int = 1
    hidden: bool = False


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes with one rank per GPU. `class_ranks` consecutive ranks share the
    classes, and `shard_ranks` (0: all) the backbone."""

    machine: Machine
    nodes: int
    gpus: int
    class_ranks: int
    shard_ranks: int = 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    def size(self, group: Group) -> int:
        """Return the number of ranks in a group."""
        shard = self.shard_ranks or self.ranks
        sizes = {"class": self.class_ranks, "data": self.ranks // self.class_ranks}
        sizes |= {"shard": shard, "replicate": self.ranks // shard, "world": self.ranks}
        return sizes[group]

    def crosses_nodes(self, group: Group) -> bool:
        """Return whether any group of this kind spans more than one node."""
        if self.nodes == 1 or self.size(group) == 1:
            return False
        return group not in ("class", "shard") or self.gpus % self.size(group) != 0

    def sent(self, each: Collective) -> float:
        """Return the bytes that a rank sends in a ring (all-reduce: Patarasu and Yuan 2009)."""
        ranks = self.size(each.group)
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
        return each.calls * each.bytes * share.get(each.operation, (ranks - 1) / ranks)

    def seconds(self, each: Collective) -> float:
        """Return the time to send the bytes over the slowest link, plus the latencies."""
        crosses = self.crosses_nodes(each.group)
        rate = self.machine.network if crosses else self.machine.link
        latency = _ACROSS_SECONDS if crosses else _NODE_SECONDS
        return each.calls * each.messages * latency + self.sent(each) / rate


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
    memory, bandwidth = device.memory_bytes, device.memory_bytes_per_second
    flops = {str(name): float(peak) for name, peak in device.peaks.items()}
    links = device.link_bytes_per_second, gbps * BYTES_PER_GBIT
    return Machine(name, "cuda", memory, bandwidth, flops, *links, device.num_sms)


def _this_cpu(ranks: int, link_gbps: float | None) -> Machine:
    """Measure this machine's CPU for about a second, and divide it among its ranks: a product and a
    convolution, both forward and backward, and copies to new and to used memory."""

    def rate(amount: float, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return amount / min(seconds) / ranks

    block, other = torch.zeros(2, _COPIED // 4)
    left, right = (torch.randn(1024, 768, requires_grad=True) for _ in range(2))
    images = torch.randn(4, 128, 28, 28, requires_grad=True)
    filters = torch.randn(128, 128, 3, 3, requires_grad=True)
    product, convolution = 2 * 1024**2 * 768, 2 * 4 * 128**2 * 28**2 * 9
    flops = {
        "fp32": rate(3 * product, lambda: (left @ right.T).sum().backward()),
        "bf16": rate(product, lambda: left.bfloat16() @ right.bfloat16().T),
        "convolution": rate(
            3 * convolution, lambda: F.conv2d(images, filters, padding=1).sum().backward()
        ),
    }
    name, memory = f"cpu ({os.cpu_count()} cores)", psutil.virtual_memory().total // ranks
    bandwidth = rate(2 * _COPIED, block.clone)
    in_place = rate(2 * _COPIED, lambda: block.copy_(other))
    links = _LOOPBACK / ranks, (link_gbps or _OTHER_GBPS) * BYTES_PER_GBIT / ranks
    flops["fp16"] = flops["bf16"]
    return Machine(name, "cpu", memory, bandwidth, flops, *links, in_place=in_place)
