"""Plans a run of a recipe on a cluster by combining the costs of its parts."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.loading.sampling import sample_list_bytes
from data.shards.manifest import Manifest
from launch.plan.backbone_cost import BackboneCost, measure_backbone
from launch.plan.classes import Classes, classes_of, num_samples, shards_of, stored_samples
from launch.plan.cluster import Cluster, Machine
from launch.plan.device_memory import Memory, memory_of
from launch.plan.head_cost import HeadShape, head_shape, measure_loss
from launch.plan.host_memory import ClassListCost, HostMemory, host_memory
from launch.plan.step_time import StepTime, step_time
from launch.plan.traffic import (
    batch_norm_traffic,
    engine_traffic,
    factored_traffic,
    first_rank_traffic,
    norm_traffic,
    scalar_traffic,
)
from launch.plan.trial_step import StepOperations, record_step
from trainer.config import Recipe
from trainer.strategies.cost import Collective, Spread
from trainer.world import mesh_shape


@dataclass(frozen=True)
class Plan:
    """The cost of one step of `recipe` on the most expensive rank of `cluster`.

    memory: device memory of that rank; host: main memory of a machine. samples: samples per epoch;
    steps: steps of the run. Both are None if neither the shards nor the recipe determine them.
    collectives: all of a step; of_strategy: those of them that the recorded operations exclude.
    passes, parts: forward passes of the backbone and micro-batches per step. adds_parts: see
    `Spread`. The operations are recorded when `operations` or `time` is first read, because
    `advice.py` needs only the memory.
    """

    recipe: Recipe
    cluster: Cluster
    classes: Classes
    backbone: BackboneCost
    head: HeadShape
    memory: Memory
    host: HostMemory
    collectives: tuple[Collective, ...]
    of_strategy: tuple[Collective, ...]
    samples: int | None
    passes: int
    parts: int
    adds_parts: bool

    @cached_property
    def operations(self) -> StepOperations:
        return record_step(
            self.recipe,
            self.backbone,
            self.head,
            self.cluster,
            adds_parts=self.adds_parts,
        )

    @cached_property
    def time(self) -> StepTime:
        return step_time(
            self.recipe,
            self.backbone,
            self.operations,
            self.collectives,
            self.cluster,
            of_strategy=self.of_strategy,
            passes=self.passes,
            parts=self.parts,
            memory_bytes=self.memory.peak,
        )

    @property
    def steps(self) -> int | None:
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

    host_bytes: main memory of a machine. None: measured on CPUs, unknown on GPUs.
    """

    machine: Machine
    nodes: int
    gpus: int
    classes: int | None = None
    samples: int | None = None
    host_bytes: int | None = None

    @property
    def main_memory(self) -> int | None:
        """Main memory of a machine in bytes, or None if unknown."""
        if self.host_bytes is None and self.machine.kind == "cpu":
            return self.machine.memory * self.gpus
        return self.host_bytes


def make_plan(
    recipe: Recipe, request: PlanRequest, *, label_vectors: np.ndarray | None = None
) -> Plan:
    """Plan one optimizer step. `label_vectors` [K, D] replace those of the shards.

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
    share = -(-recipe.train.global_batch // ranks)
    parts = min(recipe.train.micro_batches, share)
    cuda = request.machine.kind == "cuda"
    backbone = measure_backbone(recipe, rows=-(-share // parts), ranks=ranks, cuda=cuda)
    loss = measure_loss(recipe.head.loss)
    # The head may need all features first, so each micro-batch runs forward twice.
    passes = 2 * parts if recipe.calls_head_once and parts > 1 else parts
    head = head_shape(recipe, backbone, classes, loss, cluster)
    strategy = _spread(recipe, backbone, cluster, passes=passes, parts=parts)
    of_strategy = cluster.nontrivial([*strategy.collectives, *norm_traffic(recipe, backbone)])
    collectives = (
        *_collectives(recipe, backbone, head, cluster, passes, parts),
        *of_strategy,
    )
    memory = memory_of(recipe, backbone, strategy, head, cluster, parts)
    return Plan(
        recipe=recipe,
        cluster=cluster,
        classes=classes,
        backbone=backbone,
        head=head,
        memory=memory,
        host=host_memory(
            recipe,
            backbone,
            head,
            memory,
            cluster,
            ClassListCost.assumed() if manifest is None else ClassListCost.of(manifest.classes),
            label_vectors=_vector_bytes(recipe, manifest, label_vectors),
            sample_list=_sample_list_bytes(recipe, manifest, request, classes.num_classes),
            capacity=request.main_memory,
        ),
        collectives=collectives,
        of_strategy=of_strategy,
        samples=num_samples(recipe, manifest, request.samples),
        passes=passes,
        parts=parts,
        adds_parts=strategy.adds_parts,
    )


def _sample_list_bytes(
    recipe: Recipe, manifest: Manifest | None, request: PlanRequest, num_classes: int
) -> int:
    """Return the bytes of the list of samples of `data.sampling`, or 0 if the number of samples is
    unknown.
    """
    if recipe.data.sampling.power == 1:
        return 0
    samples = stored_samples(recipe, manifest) or request.samples or 0
    return sample_list_bytes(recipe.data, num_samples=samples, num_classes=num_classes)


def _vector_bytes(recipe: Recipe, manifest: Manifest | None, given: np.ndarray | None) -> int:
    """Return the bytes of the label vectors, which every rank stores, or 0 if there are none."""
    if given is not None:
        return given.nbytes
    if manifest is None or manifest.label_vectors is None:
        return 0
    path = Path(recipe.data.shards) / manifest.label_vectors
    return path.stat().st_size if path.is_file() else 0


def _spread(
    recipe: Recipe, backbone: BackboneCost, cluster: Cluster, *, passes: int, parts: int
) -> Spread:
    if cluster.ranks == 1:
        return Spread.alone(backbone.units)
    return recipe.train.strategy.spread(
        backbone.units,
        cluster.size("shard"),
        passes=passes,
        parts=parts,
        copies=cluster.size("replicate"),
        norms=backbone.norms,
    )


def _collectives(
    recipe: Recipe,
    backbone: BackboneCost,
    head: HeadShape,
    cluster: Cluster,
    passes: int,
    parts: int,
) -> tuple[Collective, ...]:
    factored = recipe.head.weights.kind == "factored"
    of_head = factored_traffic if factored else engine_traffic
    weighing = 1 if recipe.calls_head_once else parts
    return cluster.nontrivial(
        [
            *batch_norm_traffic(backbone, cluster, passes=passes, parts=parts),
            *first_rank_traffic(recipe, backbone),
            *of_head(head, cluster),
            *scalar_traffic(recipe, cluster, parts=weighing),
        ]
    )
