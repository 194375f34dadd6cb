"""The machines of a plan: their number and speed, which ranks share a node, and the time of their
collectives.

Rank r sits on node r // gpus. Class groups are contiguous ranks, data groups ranks a class group
apart, as in `trainer/world.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainer.strategies.cost import Collective, Group, Operation

# What NCCL takes for a small collective: of the order that its own tests report, assumed here.
_NODE_SECONDS = 15e-6
_ACROSS_SECONDS = 40e-6


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

    def happening(self, collectives: Iterable[Collective]) -> tuple[Collective, ...]:
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
