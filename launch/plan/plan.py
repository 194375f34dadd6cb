"""Plans a run of a recipe on a cluster by combining the costs of its parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.loading.sampling import sample_list_bytes
from data.shards.manifest import Manifest
from launch.plan.backbone import BackboneCost, trace_backbone
from launch.plan.classes import Classes, classes_of, num_samples, shards_of, stored_samples
from launch.plan.cluster import BYTES_PER_GBIT, Cluster, Collective, Machine
from launch.plan.head import Head, parts_of, share_of
from launch.plan.memory import (
    ASSUMED_CLASSES,
    BackboneShare,
    CheckpointCost,
    ClassListCost,
    MemoryTable,
    class_list,
    device_memory,
    host_memory,
)
from launch.plan.time import StepTime, step_collectives, step_time
from trainer.config import Recipe
from trainer.world import mesh_shape


@dataclass(frozen=True)
class Plan:
    """The cost of one step of `recipe` on the most expensive rank of `cluster`.

    memory: device memory of that rank; host: main memory of a machine. samples: samples per epoch,
    or None if neither the shards nor the recipe determine them.
    """

    recipe: Recipe
    cluster: Cluster
    classes: Classes
    backbone: BackboneCost
    share: BackboneShare
    head: Head
    memory: MemoryTable
    host: MemoryTable
    checkpoint: CheckpointCost
    samples: int | None

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(step_collectives(self.recipe, self.backbone, self.head))

    @cached_property
    def time(self) -> StepTime:
        return step_time(self.recipe, self.backbone, self.share, self.head, self.collectives)

    @property
    def steps(self) -> int | None:
        """Steps of the run, or None if unknown."""
        train = self.recipe.train
        if self.samples is None:
            return train.duration.steps
        return train.duration.in_steps(num_samples=self.samples, global_batch=train.global_batch)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(self.cluster.sent(each) for each in self.collectives)


@dataclass(frozen=True)
class PlanRequest:
    """The inputs of a plan in addition to the recipe. None: take the value from the shards.

    host_bytes: main memory of a machine. None: measured on CPUs, unknown on GPUs. storage: bytes
    per second between a machine and the storage of its checkpoints.
    """

    machine: Machine
    nodes: int
    gpus: int
    classes: int | None = None
    samples: int | None = None
    host_bytes: int | None = None
    storage: float = 10 * BYTES_PER_GBIT

    @property
    def main_memory(self) -> int | None:
        """Main memory of a machine in bytes, or None if unknown."""
        if self.host_bytes is None and self.machine.kind == "cpu":
            return self.machine.memory * self.gpus
        return self.host_bytes


def make_plan(
    recipe: Recipe,
    request: PlanRequest,
    *,
    label_vectors: np.ndarray | None = None,
    known: Iterable[BackboneCost] = (),
) -> Plan:
    """Plan one optimizer step. `label_vectors` [K, D] replace those of the shards. `known` are
    costs of the same backbone: its memory with other rows is computed from two of them.

    Raises ValueError, as training would, if the class group or the strategy's shard group does not
    divide the ranks, or if the number of classes is unknown.
    """
    ranks = request.nodes * request.gpus
    _, class_ranks = mesh_shape(recipe.train.class_group, size=ranks, local_size=request.gpus)
    shard_ranks = recipe.train.strategy.shard_ranks(ranks, request.gpus)
    cluster = Cluster(request.machine, request.nodes, request.gpus, class_ranks, shard_ranks)
    manifest = shards_of(recipe)
    classes = classes_of(
        recipe, manifest, request.classes, label_vectors=label_vectors, class_ranks=class_ranks
    )
    backbone = _backbone(recipe, cluster, tuple(known))
    share = BackboneShare.of(recipe, backbone, cluster)
    head = Head.of(recipe, backbone, classes, cluster)
    memory = device_memory(recipe, backbone, share, head, cluster)
    checkpoint = CheckpointCost.of(recipe, backbone, head, request.storage)
    extra = _of_data(recipe, manifest, request, classes, label_vectors)
    if recipe.checkpoint.in_background:
        # torch rounds pinned memory up to a power of two.
        rounded = 1 << (checkpoint.of_rank - 1).bit_length()
        copied = rounded if request.machine.kind == "cuda" else checkpoint.of_rank
        extra["checkpoint being written"] = (0, 0, copied)
    return Plan(
        recipe=recipe,
        cluster=cluster,
        classes=classes,
        backbone=backbone,
        share=share,
        head=head,
        memory=memory,
        host=host_memory(head, memory, extra, capacity=request.main_memory),
        checkpoint=checkpoint,
        samples=num_samples(recipe, manifest, request.samples),
    )


def _backbone(recipe: Recipe, cluster: Cluster, known: tuple[BackboneCost, ...]) -> BackboneCost:
    rows = -(-share_of(recipe, cluster) // parts_of(recipe, cluster))
    for cost in known:
        if cost.rows == rows:
            return cost
    if len(known) > 1:
        return known[0].at(rows, known[1])
    is_cuda = cluster.machine.kind == "cuda"
    return trace_backbone(recipe, rows=rows, ranks=cluster.ranks, cuda=is_cuda)


def _of_data(
    recipe: Recipe,
    manifest: Manifest | None,
    request: PlanRequest,
    classes: Classes,
    label_vectors: np.ndarray | None,
) -> dict[str, tuple[int, ...]]:
    """Return the main memory of what a rank reads from the shards."""
    cost = ClassListCost.of(ASSUMED_CLASSES if manifest is None else manifest.classes)
    vectors = 0 if label_vectors is None else label_vectors.nbytes
    if label_vectors is None and manifest is not None and manifest.label_vectors is not None:
        path = Path(recipe.data.shards) / manifest.label_vectors
        vectors = path.stat().st_size if path.is_file() else 0
    samples = 0
    if recipe.data.sampling.power != 1:
        stored = stored_samples(recipe, manifest) or request.samples or 0
        samples = sample_list_bytes(
            recipe.data, num_samples=stored, num_classes=classes.num_classes
        )
    return {
        "class list": class_list(cost, classes.num_classes),
        "label vectors": (0, vectors, vectors),
        "list of samples": (0, 0, samples),
    }
