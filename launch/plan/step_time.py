"""The step time, derived from the operations of a step.

On a GPU, it is a lower bound: each operation takes as long as computing its products at peak rate
or moving its bytes at memory bandwidth, whichever is longer (roofline model, Williams et al. 2009),
but a phase takes at least the time that the host needs to launch its operations. On a CPU, the time
of each operation is measured (`operation_timer.py`). Collectives run at the rate of their group's
slowest link, and overlap with the computation of their phase where the trainer allows it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster, Machine
from launch.plan.operations import Operation, Operations, Products
from launch.plan.trial_step import StepOperations
from trainer.config import Recipe
from trainer.strategies.cost import Collective, Phase

Bound = Literal[
    "compute", "memory bandwidth", "launches", "waits", "links in the node", "links between nodes"
]
PHASES: tuple[Phase, ...] = ("forward", "head", "backward", "optimizer", "step")


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase in seconds, as limited by compute, memory bandwidth and communication.

    launches: kernels that the host launches, which takes `launching` seconds. The device works at
    the same time, so only the longer of the two times counts. waits: how often the host waits for
    the device. After these waits, the device is idle for `waiting` seconds in total.
    """

    phase: Phase
    compute: float
    memory: float
    links: float
    across: bool
    launches: int
    launching: float
    waits: int
    waiting: float

    @property
    def device(self) -> float:
        return self.compute + self.memory + self.links

    @property
    def seconds(self) -> float:
        return max(self.device, self.launching) + self.waiting

    @property
    def bound(self) -> Bound:
        if self.launching > self.device:
            return "launches"
        links: Bound = "links between nodes" if self.across else "links in the node"
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory bandwidth": self.memory,
            links: self.links,
            "waits": self.waiting,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class StepTime:
    """The time of each phase. flops: floating-point operations of one rank per step."""

    phases: tuple[PhaseTime, ...]
    flops: float

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def launches(self) -> int:
        return sum(phase.launches for phase in self.phases)

    @property
    def waits(self) -> int:
        return sum(phase.waits for phase in self.phases)


def step_time(
    recipe: Recipe,
    backbone: BackboneCost,
    step: StepOperations,
    collectives: Iterable[Collective],
    cluster: Cluster,
    *,
    of_strategy: Sequence[Collective],
    passes: int,
    parts: int,
    memory_bytes: int,
) -> StepTime:
    """Return the time of one optimizer step on the rank with the most work.

    of_strategy: the collectives that neither `backbone` nor `step` includes as operations.
    memory_bytes: memory that the step needs.
    """
    of_backbone: dict[Phase, tuple[Operations, int]] = {
        "forward": (backbone.forward, passes),
        "backward": (backbone.backward, parts),
    }
    own, phases, flops = list(collectives), [], 0
    for phase in PHASES:
        operations = Counter(step.phases.get(phase, {}))
        each_time, times = of_backbone.get(phase, (Counter(), 0))
        for operation, number in each_time.items():
            operations[operation] += number * times
        for collective in of_strategy:
            if collective.phase == phase:
                operations.update(_launched(collective))
        phases.append(_phase(phase, operations, own, cluster, recipe, memory_bytes))
        flops += sum(operation.flops * number for operation, number in operations.items())
    return StepTime(tuple(p for p in phases if p.seconds), float(flops))


def _launched(collective: Collective) -> Operations:
    """Return the operations of a collective, and those that copy tensors to and from its
    buffers."""
    calls, copies = collective.calls, collective.copies
    launched = Counter({Operation(): calls * collective.messages})
    if copies:
        launched[Operation(bytes=collective.copied // copies)] += calls * copies
    return launched


def _phase(
    phase: Phase,
    operations: Operations,
    collectives: list[Collective],
    cluster: Cluster,
    recipe: Recipe,
    memory_bytes: int,
) -> PhaseTime:
    machine = cluster.machine
    compute = memory = 0.0
    for operation, number in operations.items():
        at_peak = operation.flops / _peak(machine, recipe, operation.products)
        moving = operation.bytes / machine.bandwidth
        seconds = max(at_peak, moving)
        if machine.timer is not None:
            seconds = machine.timer.seconds(operation, step_bytes=memory_bytes, otherwise=seconds)
        if at_peak >= moving:
            compute += number * seconds
        else:
            memory += number * seconds
    mine = [c for c in collectives if c.phase == phase]
    hidden = sum(cluster.seconds(c) for c in mine if c.hidden)
    waited = sum(cluster.seconds(c) for c in mine if not c.hidden)
    # Hidden collectives overlap with the work of the phase, so they add only the time by which they
    # exceed it.
    links = waited + max(0.0, hidden - compute - memory)
    launches = sum(each.launches * number for each, number in operations.items())
    waits = sum(each.waits * number for each, number in operations.items())
    return PhaseTime(
        phase,
        compute,
        memory,
        links,
        any(cluster.crosses_nodes(c.group) for c in mine),
        launches=launches,
        launching=launches * machine.launch_seconds,
        waits=waits,
        waiting=waits * machine.wait_seconds,
    )


def _peak(machine: Machine, recipe: Recipe, products: Products) -> float:
    match products:
        case "half":
            arithmetic: str = recipe.train.precision
        case "convolution":
            arithmetic = "tf32"
        case "single":
            arithmetic = "tf32" if recipe.train.tf32 else "fp32"
    return machine.flops.get(arithmetic, machine.flops["fp32"])
