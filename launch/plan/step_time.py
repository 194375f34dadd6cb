"""A lower bound on the step time, derived from the operations of a step.

Each operation takes as long as computing its products at peak rate or moving its bytes at memory
bandwidth, whichever is longer (roofline model, Williams et al. 2009). Collectives run at the rate
of their group's slowest link, and overlap with the computation of their phase where the trainer
allows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launch.plan.backbone_cost import BackboneCost
from launch.plan.cluster import Cluster, Machine
from launch.plan.head_cost import HeadShape
from launch.plan.operations import Products, Work
from trainer.config import Recipe
from trainer.strategies.cost import FLOAT32, Collective, Phase, Spread

Bound = Literal["compute", "memory bandwidth", "links in the node", "links between nodes"]
PHASES: tuple[Phase, ...] = ("forward", "head", "backward", "optimizer", "step")


@dataclass(frozen=True)
class PhaseTime:
    """Time of a phase in seconds, as limited by compute, memory bandwidth and communication."""

    phase: Phase
    compute: float
    memory: float
    links: float
    across: bool

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.links

    @property
    def bound(self) -> Bound:
        links: Bound = "links between nodes" if self.across else "links in the node"
        parts: dict[Bound, float] = {
            "compute": self.compute,
            "memory bandwidth": self.memory,
            links: self.links,
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
    def slowest(self) -> PhaseTime:
        return max(self.phases, key=lambda phase: phase.seconds)


def step_time(
    recipe: Recipe,
    backbone: BackboneCost,
    spread: Spread,
    head: HeadShape,
    collectives: Iterable[Collective],
    cluster: Cluster,
    *,
    passes: int,
    parts: int,
) -> StepTime:
    """Return the time of one optimizer step on the rank with the most work."""
    factored = recipe.head.weights.kind == "factored"
    head_work = _factored_work(head) if factored else _head_work(head)
    works: dict[Phase, list[Work]] = {
        "forward": [*backbone.forward] * passes,
        "head": [*head_work] * head.calls,
        "backward": [*backbone.backward] * parts,
        "optimizer": [_optimizer_work(recipe, spread, head)],
        "step": [],
    }
    own = list(collectives)
    phases = tuple(_phase(each, works[each], own, cluster, recipe) for each in PHASES)
    flops = float(sum(work.flops for phase in works.values() for work in phase))
    return StepTime(tuple(p for p in phases if p.seconds), flops)


def _phase(
    phase: Phase,
    works: list[Work],
    collectives: list[Collective],
    cluster: Cluster,
    recipe: Recipe,
) -> PhaseTime:
    compute = memory = 0.0
    for work in works:
        at_peak = work.flops / _peak(cluster.machine, recipe, work.products)
        moving = work.bytes / cluster.machine.bandwidth
        if at_peak >= moving:
            compute += at_peak
        else:
            memory += moving
    mine = [c for c in collectives if c.phase == phase]
    hidden = sum(cluster.seconds(c) for c in mine if c.hidden)
    waited = sum(cluster.seconds(c) for c in mine if not c.hidden)
    # Hidden collectives overlap with the work of the phase, so they add only the time by which they
    # exceed it.
    links = waited + max(0.0, hidden - compute - memory)
    across = any(cluster.crosses_nodes(c.group) for c in mine)
    return PhaseTime(phase, compute, memory, links, across)


def _peak(machine: Machine, recipe: Recipe, products: Products) -> float:
    match products:
        case "half":
            arithmetic: str = recipe.train.precision
        case "convolution":
            arithmetic = "tf32"
        case "single":
            arithmetic = "tf32" if recipe.train.tf32 else "fp32"
    return machine.flops.get(arithmetic, machine.flops["fp32"])


def _head_work(head: HeadShape) -> list[Work]:
    """Return the work for the logits, for recomputing them, and for all gradients of the head."""
    products: Products = "half" if head.itemsize < FLOAT32 else "single"
    product = 2 * head.logits * head.dim
    again = 1 - head.kept_share
    rows = head.nodes * head.dim
    logits, loss = head.logits, head.loss
    read = rows * FLOAT32 + logits * head.itemsize
    back = int(read * (1 + again)) + rows * FLOAT32
    if not head.classes.plain:  # the weight vector of a class is the sum over its path
        read += int(rows * FLOAT32 * head.classes.depth)
        back += int(rows * FLOAT32 * head.classes.depth * (1 + again))
    return [
        Work(product, read, products),
        Work(0, int(logits * loss.forward), "single"),
        Work(int(product * (2 + again)), back, products),
        Work(0, int(logits * (loss.forward + loss.backward)), "single"),
    ]


def _factored_work(head: HeadShape) -> list[Work]:
    """Return the float64 work of products of d x d matrices with the rows and with each other."""
    d, rows = head.dim, head.rows
    products = 2 * d * d * (4 * rows + 12 * d)
    return [Work(products, 8 * (12 * d * d + 8 * rows * d), "single")]


def _optimizer_work(recipe: Recipe, spread: Spread, head: HeadShape) -> Work:
    """Return the work of an update.

    An update reads the weights, gradients and moments, writes the weights and moments, and reads
    and writes the averages.
    """
    shard = head.shard
    if recipe.head.weights.kind == "factored":
        shard = 0
    passes = recipe.optimizer.passes
    passes += 3 if recipe.train.ema is not None else 0
    passes += 1  # the norm of the gradients
    return Work(0, passes * (spread.updated + shard), "single")
