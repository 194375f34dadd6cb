"""The time of a step: a roofline for the work of each phase, and its collectives.

An operation takes as long as its products at the peak rate or its bytes at the memory bandwidth,
whichever is longer (Williams et al. 2009). Collectives run at the rate of their group's slowest
link, and overlap with the computation of their phase where the trainer allows it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launch.plan.cluster import Cluster, Collective, Group, Phase, Transfer
from launch.plan.head import FLOAT32, FLOAT64, ROUNDING, Head
from launch.plan.memory import BackboneShare
from trainer.backbone.trace import BackboneCost, Work
from trainer.config import Recipe


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
    def bound(self) -> str:
        links = "links between nodes" if self.across else "links in the node"
        parts = {"compute": self.compute, "memory bandwidth": self.memory, links: self.links}
        return max(parts, key=lambda name: parts[name])


def phase_times(
    work: dict[Phase, Counter[Work]],
    collectives: Iterable[Collective],
    cluster: Cluster,
    recipe: Recipe,
) -> Iterator[PhaseTime]:
    """Yield the time of each phase on the rank with the most work."""
    machine, train = cluster.machine, recipe.train
    for phase, counter in work.items():
        compute = memory = 0.0
        in_place = machine.in_place or machine.bandwidth
        bandwidth = in_place if phase == "optimizer" else machine.bandwidth
        for each, number in counter.items():
            moving, products = each.bytes / bandwidth, 0.0
            if each.flops:
                peak = machine.peak(each.kind, precision=train.precision, tf32=train.tf32)
                products = each.flops / peak
            if products >= moving:
                compute += number * products
            else:
                memory += number * moving
        mine = [each for each in collectives if each.phase == phase]
        hidden = sum(cluster.seconds(each) for each in mine if each.hidden)
        waited = sum(cluster.seconds(each) for each in mine if not each.hidden)
        # Hidden collectives add only the time by which they exceed the work of the phase.
        links = waited + max(0.0, hidden - compute - memory)
        across = any(cluster.crosses_nodes(each.group) for each in mine)
        yield PhaseTime(phase, compute, memory, links, across)


def step_work(
    recipe: Recipe, backbone: BackboneCost, share: BackboneShare, head: Head
) -> dict[Phase, Counter[Work]]:
    """Return the work of each phase of one optimizer step."""
    passes, parts = passes_of(recipe, head), head.parts
    return {
        "forward": Counter({each: n * passes for each, n in backbone.forward_work.items()}),
        "head": head.work(),
        "backward": Counter({each: n * parts for each, n in backbone.backward_work.items()}),
        "optimizer": Counter([Work("other", 0, _updated_bytes(recipe, share, head))]),
    }


def passes_of(recipe: Recipe, head: Head) -> int:
    """Return the forward passes of a step. If the head needs all features first, each micro-batch
    runs forward twice."""
    return head.parts * (2 if recipe.calls_head_once and head.parts > 1 else 1)


def _updated_bytes(recipe: Recipe, share: BackboneShare, head: Head) -> int:
    """Return the bytes that the update reads and writes: weights and moments twice, and gradients
    once. Clipping reads and scales the gradients; averages are read and written. If the optimizer
    copies tensors, its step is written once and read twice, and the weights are read again."""
    moments, train = recipe.optimizer.num_moments, recipe.train
    passes = 3 + 2 * moments + 4 * recipe.optimizer.copies_tensors
    passes += 3 * (train.clip_norm is not None) + 3 * (train.ema is not None)
    rows = passes * head.bytes_of_rows(FLOAT32)
    if head.row_bytes < FLOAT32:
        rows += head.nodes * head.dim * ROUNDING * (1 + moments)
    return passes * share.updated + rows * (head.moment > 0)


def step_collectives(recipe: Recipe, backbone: BackboneCost, head: Head) -> list[Collective]:
    """Return the collectives of a step that send data, without those of scalars and labels."""
    found = [*_of_backbone(recipe, backbone, head), *_of_batch_norm(recipe, backbone, head)]
    found += _of_head(head)
    return [each for each in found if each.bytes * each.calls and head.cluster.size(each.group) > 1]


def _of_backbone(recipe: Recipe, backbone: BackboneCost, head: Head) -> Iterator[Collective]:
    sharding, cluster, parts = recipe.train.strategy.sharding, head.cluster, head.parts
    shards = cluster.size("shard")
    numel = sum(backbone.padded(shards if sharding.weights else 1))
    weights, gradients = sharding.param_bytes * numel, sharding.reduce_bytes * numel
    passes, again = passes_of(recipe, head), parts * sharding.regathers
    # (what, transfer, group, phase, bytes, calls)
    table: list[tuple[str, Transfer, Group, Phase, int, int]] = [
        ("weights", "all_gather", "shard", "forward", weights, passes),
        ("weights again", "all_gather", "shard", "backward", weights, again),
        ("gradients", "reduce_scatter", "shard", "backward", gradients, parts),
        ("shards of gradients", "all_reduce", "replicate", "backward", gradients // shards, 1),
    ]
    if not sharding.weights:
        # If only gradients are sharded, those of each micro-batch are summed at once.
        calls, updated = parts if sharding.gradients else 1, weights * sharding.updates
        table = [
            ("gradients", "all_reduce", "world", "backward", gradients, calls),
            ("updated weights", "all_gather", "world", "optimizer", updated, 1),
        ]
    messages = len(backbone.units) if sharding.gathers_blocks else 1
    for what, transfer, group, phase, size, calls in table:
        name, hidden = f"backbone: {what}", phase != "optimizer"
        yield Collective(name, transfer, group, size, phase, calls, hidden, messages)


def _of_batch_norm(recipe: Recipe, backbone: BackboneCost, head: Head) -> list[Collective]:
    """Return the exchange of mean, variance and count in forward, and of two sums in backward; with
    local batch norm, that of the statistics of rank 0."""
    if recipe.backbone.batch_norm == "local":
        what = "batch norm: statistics of rank 0"
        return [Collective(what, "broadcast", "world", backbone.buffers, "backward")]
    channels, layers, parts = sum(backbone.norms), len(backbone.norms), head.parts
    gathered = head.cluster.ranks * (2 * channels + layers) * FLOAT32
    passes = passes_of(recipe, head) + parts * recipe.train.activation_checkpointing
    sums, name = 2 * channels * FLOAT32, "batch norm"
    return [
        Collective(name, "all_gather", "world", gathered, "forward", passes, messages=layers),
        Collective(name, "all_reduce", "world", sums, "backward", parts, messages=layers),
    ]


def _of_head(head: Head) -> Iterator[Collective]:
    """Yield the collectives of `ClassHead`: features and statistics are gathered, the gradients of
    the features are reduced, and those of the rows are summed over class groups. `FactoredHead`
    gathers features and sums d x d matrices in float64."""
    cluster, width, dim = head.cluster, head.loss.width, head.dim
    ranks, of_rows = cluster.class_ranks, head.group_rows * FLOAT32
    features, square = ranks * head.rows * dim, (dim + 1) * dim * FLOAT64
    boundary = 2 * head.classes.boundary * (dim + head.recipe.head.bias) * FLOAT32
    of_data, gradients = cluster.size("data") * of_rows, head.bytes_of_rows(FLOAT32)
    # (what, transfer, group, bytes, calls)
    table: list[tuple[str, Transfer, Group, int, int]] = [
        ("features", "all_gather", "class", features * head.compute_bytes, head.calls),
        ("boundary rows and gradients", "all_reduce", "class", boundary, head.calls),
        ("statistics", "all_gather", "class", ranks * of_rows * width, head.calls),
        ("statistics", "all_gather", "data", of_data * width, head.calls),
        ("feature gradients", "reduce_scatter", "class", features * FLOAT32, head.calls),
        ("weight gradients", "all_reduce", "data", gradients, 1),
    ]
    if head.is_factored:
        table = [
            ("labels' rows", "reduce_scatter", "class", features * FLOAT64, head.calls),
            ("features", "all_gather", "class", features * head.feature_bytes, head.calls),
            ("features", "all_gather", "data", of_data * dim, head.calls),
            ("sums", "all_reduce", "class", square, 2),
            ("sums", "all_reduce", "data", square, 1),
        ]
    for what, transfer, group, size, calls in table:
        yield Collective(f"head: {what}", transfer, group, size, "head", calls)
