"""The collectives of one optimizer step, as data: what travels, in which group, how many bytes.

Bytes are those of the whole tensor: the input of an all-reduce or reduce-scatter, the output of an
all-gather. What a rank sends follows from the ring algorithm that NCCL and gloo use for them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launch.plan.cluster import Cluster, Group

Kind = Literal["all_gather", "all_reduce", "reduce_scatter", "broadcast", "reduce"]
Phase = Literal["forward", "head", "backward", "optimizer", "step"]


@dataclass(frozen=True)
class Collective:
    """`calls` of `bytes` each in a step, a call in so many `messages`. `hidden`: other work of its
    phase may run meanwhile."""

    what: str
    kind: Kind
    group: Group
    bytes: int
    phase: Phase
    calls: int = 1
    hidden: bool = False
    messages: int = 1

    @property
    def total(self) -> int:
        """Bytes of all calls."""
        return self.bytes * self.calls

    def sent(self, cluster: Cluster) -> float:
        """Bytes that a rank puts on the wire."""
        return self.total * _ring_share(self.kind, cluster.size(self.group))

    def seconds(self, cluster: Cluster) -> float:
        waiting = self.calls * self.messages * cluster.latency(self.group)
        return waiting + self.sent(cluster) / cluster.bytes_per_second(self.group)


def _ring_share(kind: Kind, ranks: int) -> float:
    """Sent bytes over those of the tensor (Patarasu and Yuan 2009 for all-reduce)."""
    if ranks == 1:
        return 0.0
    if kind in ("broadcast", "reduce"):
        return 1.0  # a chain: every rank but the last hands all of it on
    share = (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share


def that_happen(collectives: Iterable[Collective], cluster: Cluster) -> tuple[Collective, ...]:
    """Those with something to send to somebody."""
    return tuple(c for c in collectives if c.total and cluster.size(c.group) > 1)


def totals(collectives: Iterable[Collective]) -> dict[tuple[Kind, Group], int]:
    """Bytes of a step by kind and group."""
    sums: dict[tuple[Kind, Group], int] = {}
    for each in collectives:
        key = each.kind, each.group
        sums[key] = sums.get(key, 0) + each.total
    return sums
