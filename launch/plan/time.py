"""The time of a step: a roofline for the work of each phase, and its collectives.

An operation takes as long as its products at the peak rate or its bytes at the memory bandwidth,
whichever is longer (Williams et al. 2009). Collectives run at the rate of their group's slowest
link, and overlap with the computation of their phase where the trainer allows it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from launch.plan.cluster import Collective, Phase
from launch.plan.head import FLOAT32, FLOAT64, ROUNDING, Head
from launch.plan.memory import BackboneShare
from trainer.backbone.trace import Work


class PhaseTime(NamedTuple):
    """Seconds of a phase, as limited by compute, memory bandwidth and communication."""

    phase: Phase
    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        return self.compute + self.memory + self.links


def phase_times(
    head: Head, share: BackboneShare, collectives: Iterable[Collective]
) -> Iterator[PhaseTime]:
    """Yield the time of each phase of an optimizer step on the rank with the most work."""
    cluster, backbone, train = head.cluster, head.backbone, head.recipe.train
    machine, passes, parts = cluster.machine, head.passes, head.parts
    works: dict[Phase, Counter[Work]] = {
        "forward": Counter({each: n * passes for each, n in backbone.forward_work.items()}),
        "head": head.work(),
        "backward": Counter({each: n * parts for each, n in backbone.backward_work.items()}),
        "optimizer": Counter([Work("other", 0, _updated_bytes(head, share))]),
    }
    for phase, work in works.items():
        compute = memory = 0.0
        in_place = machine.in_place or machine.bandwidth
        bandwidth = in_place if phase == "optimizer" else machine.bandwidth
        for each, number in work.items():
            peak = machine.peak(each.kind, precision=train.precision, tf32=train.tf32)
            products, moving = each.flops / peak, each.bytes / bandwidth
            if products and products >= moving:
                compute += number * products
            else:
                memory += number * moving
        mine = [each for each in collectives if each.phase == phase]
        hidden = sum(cluster.seconds(each) for each in mine if each.hidden)
        waited = sum(cluster.seconds(each) for each in mine if not each.hidden)
        # Hidden collectives add only the time by which they exceed the work of the phase.
        links = waited + max(0.0, hidden - compute - memory)
        yield PhaseTime(phase, compute, memory, links)


def _updated_bytes(head: Head, share: BackboneShare) -> int:
    """Return the bytes that the update reads and writes: weights and moments twice, and gradients
    once. Clipping reads and scales the gradients; averages are read and written."""
    optimizer, train = head.recipe.optimizer, head.recipe.train
    moments = optimizer.num_moments
    passes = 3 + 2 * moments
    passes += 3 * (train.clip_norm is not None) + 3 * (train.ema is not None)
    rows = passes * head.bytes_of_rows(FLOAT32)
    if head.row_bytes < FLOAT32:
        rows += head.nodes * head.dim * ROUNDING * (1 + moments)
    return passes * share.updated + rows * (head.moment > 0)


def step_collectives(head: Head) -> list[Collective]:
    """Return the collectives of a step that send data, without those of scalars and labels."""
    found = [*_of_backbone(head), *_of_head(head)]
    return [each for each in found if each.bytes * each.calls and head.cluster.size(each.group) > 1]


def _of_backbone(head: Head) -> list[Collective]:
    """Return the collectives of the strategy, and of synchronized batch norm: the exchange of mean,
    variance and count in forward, and of two sums in backward."""
    recipe, backbone, parts, passes = head.recipe, head.backbone, head.parts, head.passes
    sharding, shards = recipe.train.strategy.sharding, head.cluster.size("shard")
    numel = sum(backbone.padded(shards if sharding.weights else 1))
    weights, gradients = sharding.param_bytes * numel, sharding.reduce_bytes * numel
    units = len(backbone.units) if sharding.gathers_blocks else 1
    # If only gradients are sharded, those of each micro-batch are summed at once.
    sums, updated = parts if sharding.gradients else 1, weights * sharding.updates
    of_weights = [
        Collective("gradients", "all_reduce", "world", gradients, "backward", sums, units, True),
        Collective("updated weights", "all_gather", "world", updated, "optimizer", 1, units),
    ]
    if sharding.weights:
        again, piece = parts * sharding.regathers, gradients // shards
        of_weights = [
            Collective("weights", "all_gather", "shard", weights, "forward", passes, units, True),
            Collective("weights", "all_gather", "shard", weights, "backward", again, units, True),
            Collective(
                "gradients", "reduce_scatter", "shard", gradients, "backward", parts, units, True
            ),
            Collective("gradients", "all_reduce", "replicate", piece, "backward", 1, units, True),
        ]
    channels, layers, what = sum(backbone.norms), len(backbone.norms), "batch norm"
    gathered = head.cluster.ranks * (2 * channels + layers) * FLOAT32
    normed, sums = passes + parts * recipe.train.activation_checkpointing, 2 * channels * FLOAT32
    return [
        *of_weights,
        Collective(what, "all_gather", "world", gathered, "forward", normed, layers),
        Collective(what, "all_reduce", "world", sums, "backward", parts, layers),
    ]


def _of_head(head: Head) -> list[Collective]:
    """Return the collectives of `ClassHead`: features and statistics are gathered, the gradients of
    the features are reduced, and those of the rows are summed over class groups. `FactoredHead`
    gathers features and sums d x d matrices in float64."""
    cluster, dim, calls = head.cluster, head.dim, head.calls
    ranks, of_rows = cluster.class_ranks, head.group_rows * FLOAT32
    features, of_data = ranks * head.rows * dim, cluster.size("data") * of_rows
    if head.is_factored:
        square, sent = (dim + 1) * dim * FLOAT64, features * head.backbone.feature_bytes
        return [
            Collective(
                "labels' rows", "reduce_scatter", "class", features * FLOAT64, "head", calls
            ),
            Collective("features", "all_gather", "class", sent, "head", calls),
            Collective("features", "all_gather", "data", of_data * dim, "head", calls),
            Collective("sums", "all_reduce", "class", square, "head", 2),
            Collective("sums", "all_reduce", "data", square, "head"),
        ]
    boundary = 2 * head.classes.boundary * (dim + head.recipe.head.bias) * FLOAT32
    sent, width = features * head.compute_bytes, head.loss.width
    rows = head.bytes_of_rows(FLOAT32)
    return [
        Collective("features", "all_gather", "class", sent, "head", calls),
        Collective("boundary rows and gradients", "all_reduce", "class", boundary, "head", calls),
        Collective("statistics", "all_gather", "class", ranks * of_rows * width, "head", calls),
        Collective("statistics", "all_gather", "data", of_data * width, "head", calls),
        Collective(
            "feature gradients", "reduce_scatter", "class", features * FLOAT32, "head", calls
        ),
        Collective("head gradients", "all_reduce", "data", rows, "head"),
    ]
