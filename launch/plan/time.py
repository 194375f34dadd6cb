"""The time of a step: a roofline for the work of each phase, and its collectives.

An operation takes as long as its products at the peak rate or its bytes at the memory bandwidth,
whichever is longer. Collectives run at the rate of their group's slowest link, and overlap with the
computation of their phase where the trainer allows it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from heads.engine.global_loss import reduces
from launch.plan.backbone import BackboneCost
from launch.plan.cluster import Cluster, Collective, Phase, Transfer
from launch.plan.head import FLOAT32, ROUNDING, Head, parts_of
from launch.plan.memory import BackboneShare
from trainer.backbone.trace import Work
from trainer.config import Recipe

Bound = Literal["compute", "memory bandwidth", "links in the node", "links between nodes"]
_FLOAT64 = 8


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, as limited by compute, memory bandwidth and communication."""

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


def step_time(
    recipe: Recipe,
    backbone: BackboneCost,
    share: BackboneShare,
    head: Head,
    collectives: Iterable[Collective],
) -> StepTime:
    """Return the time of one optimizer step on the rank with the most work."""
    parts, passes = parts_of(recipe, head.cluster), passes_of(recipe, head.cluster)
    work: dict[Phase, Counter[Work]] = {
        "forward": Counter({each: n * passes for each, n in backbone.forward_work.items()}),
        "head": head.work(),
        "backward": Counter({each: n * parts for each, n in backbone.backward_work.items()}),
        "optimizer": Counter([Work("other", 0, _optimizer_bytes(recipe, share, head))]),
    }
    own = list(collectives)
    phases = tuple(_phase(phase, each, own, head.cluster, recipe) for phase, each in work.items())
    flops = sum(each.flops * n for of_phase in work.values() for each, n in of_phase.items())
    return StepTime(phases, float(flops))


def passes_of(recipe: Recipe, cluster: Cluster) -> int:
    """Return the forward passes of a step. If the head needs all features first, each micro-batch
    runs forward twice."""
    parts = parts_of(recipe, cluster)
    return 2 * parts if recipe.calls_head_once and parts > 1 else parts


def _phase(
    phase: Phase,
    work: Counter[Work],
    collectives: list[Collective],
    cluster: Cluster,
    recipe: Recipe,
) -> PhaseTime:
    compute = memory = 0.0
    for each, number in work.items():
        seconds, is_compute = cluster.machine.seconds(recipe, each)
        if is_compute:
            compute += number * seconds
        else:
            memory += number * seconds
    mine = [each for each in collectives if each.phase == phase]
    hidden = sum(cluster.seconds(each) for each in mine if each.hidden)
    waited = sum(cluster.seconds(each) for each in mine if not each.hidden)
    # Hidden collectives add only the time by which they exceed the work of the phase.
    links = waited + max(0.0, hidden - compute - memory)
    across = any(cluster.crosses_nodes(each.group) for each in mine)
    return PhaseTime(phase, compute, memory, links, across)


def _optimizer_bytes(recipe: Recipe, share: BackboneShare, head: Head) -> int:
    """Return the bytes that the update reads and writes: weights and moments twice, gradients once,
    and again to compute and apply the clipping factor; if the optimizer copies tensors, its step is
    written once and read twice, and the weights are read again for their norms."""
    optimizer = recipe.optimizer
    passes = 3 + 2 * optimizer.num_moments + 4 * optimizer.copies_tensors
    if recipe.train.clip_norm is not None:
        passes += 3
    if recipe.train.ema is not None:
        passes += 3
    moved = passes * share.updated
    if head.is_factored or head.is_fused:
        return moved
    if head.row_dtype == torch.float32:
        return moved + passes * head.moment
    numbers = head.nodes * head.dim
    return moved + numbers * (passes * FLOAT32 + ROUNDING * (1 + optimizer.num_moments))


# ---- collectives


def step_collectives(recipe: Recipe, backbone: BackboneCost, head: Head) -> list[Collective]:
    """Return the collectives of a step that send data, without scalars and labels."""
    cluster = head.cluster
    parts, passes = parts_of(recipe, cluster), passes_of(recipe, cluster)
    found = [
        *_of_strategy(recipe, backbone, cluster, parts, passes),
        *_of_batch_norm(recipe, backbone, cluster, parts, passes),
        *(_of_factored_head(head) if head.is_factored else _of_head(head)),
    ]
    return [each for each in found if each.bytes and cluster.sizes[each.group] > 1]


def _of_strategy(
    recipe: Recipe, backbone: BackboneCost, cluster: Cluster, parts: int, passes: int
) -> list[Collective]:
    sharding = recipe.train.strategy.sharding
    numel = sum(backbone.padded(cluster.sizes["shard"] if sharding.weights else 1))
    reduced = sharding.reduce_bytes * numel
    if not sharding.weights:
        # If only gradients are sharded, each micro-batch is summed, because the sum is not kept.
        calls = parts if sharding.gradients else 1
        found = [
            Collective(
                "backbone: gradients",
                "all_reduce",
                "world",
                reduced,
                "backward",
                calls,
                hidden=True,
            )
        ]
        if sharding.updates:
            what, size = "backbone: updated weights", numel * FLOAT32
            found.append(Collective(what, "all_gather", "world", size, "optimizer"))
        return found
    weights, units = sharding.param_bytes * numel, len(backbone.units)

    def collective(
        what: str, operation: Transfer, phase: Phase, size: int, calls: int
    ) -> Collective:
        group = "replicate" if operation == "all_reduce" else "shard"
        return Collective(
            f"backbone: {what}", operation, group, size, phase, calls, hidden=True, messages=units
        )

    found = [collective("weights", "all_gather", "forward", weights, passes)]
    if sharding.regathers:
        found.append(collective("weights again", "all_gather", "backward", weights, parts))
    shards = reduced // cluster.sizes["shard"]
    return [
        *found,
        collective("gradients", "reduce_scatter", "backward", reduced, parts),
        collective("shards of gradients", "all_reduce", "backward", shards, 1),
    ]


def _of_batch_norm(
    recipe: Recipe, backbone: BackboneCost, cluster: Cluster, parts: int, passes: int
) -> list[Collective]:
    """Return the exchange of mean, variance and count in forward, and of two sums in backward; with
    local batch norm, that of the statistics of rank 0."""
    if recipe.backbone.batch_norm == "local":
        what = "batch norm: statistics of rank 0"
        return [Collective(what, "broadcast", "world", backbone.buffers, "backward")]
    channels, layers = sum(backbone.norms), len(backbone.norms)
    gathered = cluster.ranks * (2 * channels + layers) * FLOAT32
    again = passes + parts * recipe.train.activation_checkpointing
    sums = 2 * channels * FLOAT32
    name = "batch norm"
    return [
        Collective(name, "all_gather", "world", gathered, "forward", again, messages=layers),
        Collective(name, "all_reduce", "world", sums, "backward", parts, messages=layers),
    ]


def _of_head(head: Head) -> list[Collective]:
    """Return the collectives of `ClassHead`: features and statistics are gathered, the gradients of
    the features are reduced, and those of the rows are summed over class groups."""
    group, calls = head.cluster.class_ranks * head.rows, head.calls
    boundary = head.classes.boundary * (head.dim + head.recipe.head.bias) * FLOAT32
    each_call: list[tuple[str, Transfer, int]] = [
        ("features", "all_gather", group * head.dim * head.compute_bytes),
        ("boundary rows", "all_reduce", boundary),
        *_statistics(head),
        ("boundary gradients", "all_reduce", boundary),
        ("feature gradients", "reduce_scatter", group * head.dim * FLOAT32),
    ]
    of_data = head.group_rows * head.cluster.sizes["data"] * head.loss.width * FLOAT32
    gradients = head.float32_gradients
    return [
        *(
            Collective(f"head: {what}", operation, "class", size, "head", calls)
            for what, operation, size in each_call
        ),
        Collective("head: statistics", "all_gather", "data", of_data, "head", calls),
        Collective("head: weight gradients", "all_reduce", "data", gradients, "head"),
    ]


def _statistics(head: Head) -> list[tuple[str, Transfer, int]]:
    """Return the exchange of statistics in a class group (`heads/engine/global_loss.py`)."""
    size, shifts = head.group_rows * head.loss.width * FLOAT32, head.loss.shifts
    ranks = head.cluster.class_ranks
    if shifts is not None:
        maxima = head.group_rows * shifts * FLOAT32
        if reduces(ranks, size, maxima):
            return [("statistics", "all_reduce", size + maxima)]
    return [("statistics", "all_gather", ranks * size)]


def _of_factored_head(head: Head) -> list[Collective]:
    """Return the collectives of `FactoredHead`, which sends d x d sums instead of the gradients of
    its weights."""
    group, calls = head.cluster.class_ranks * head.rows, head.calls
    world = head.group_rows * head.cluster.sizes["data"]
    rows, square = head.dim * _FLOAT64, (head.dim + 1) * head.dim * _FLOAT64
    features = head.dim * head.feature_bytes
    return [
        Collective("head: labels' rows", "reduce_scatter", "class", group * rows, "head", calls),
        Collective("head: features", "all_gather", "class", group * features, "head", calls),
        Collective("head: features", "all_gather", "data", world * features, "head", calls),
        Collective("head: sums", "all_reduce", "class", 2 * square, "optimizer"),
        Collective("head: sums", "all_reduce", "data", square, "optimizer"),
    ]
