"""Plans a run of a recipe on a cluster by combining the costs of its parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from launch.plan.classes import class_list_bytes, classes_of, data_bytes, num_samples, shards_of
from launch.plan.cluster import BYTES_PER_GBIT, Cluster, Collective, Machine, Phase
from launch.plan.head import Head
from launch.plan.memory import BackboneShare, CheckpointCost, device_memory, host_memory
from launch.plan.time import PhaseTime, phase_times, step_collectives, step_work
from trainer.backbone.trace import BackboneCost, Work, trace_backbone
from trainer.config import Recipe
from trainer.world import mesh_shape


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


class Plan:
    """The cost of one step of `recipe` on the most expensive rank of `cluster`.

    memory: device memory of that rank; host: main memory of a machine. samples: samples per epoch,
    or None if neither the shards nor the recipe determine them. steps: steps of the run, or None.

    `known` are costs of the same backbone: its memory with other rows is computed from two of them.

    Raises ValueError, as training would, if the class group or the strategy's shard group does not
    divide the ranks, or if the number of classes is unknown.
    """

    def __init__(
        self, recipe: Recipe, request: PlanRequest, *, known: Sequence[BackboneCost] = ()
    ) -> None:
        self.recipe = recipe
        machine, ranks = request.machine, request.nodes * request.gpus
        _, class_ranks = mesh_shape(recipe.train.class_group, size=ranks, local_size=request.gpus)
        shard_ranks = recipe.train.strategy.shard_ranks(ranks, request.gpus)
        self.cluster = Cluster(machine, request.nodes, request.gpus, class_ranks, shard_ranks)
        manifest = shards_of(recipe)
        self.classes = classes_of(recipe, manifest, request.classes, class_ranks=class_ranks)
        self.backbone = self._backbone(known)
        self.share = BackboneShare.of(recipe, self.backbone, self.cluster)
        self.head = Head(recipe, self.backbone, self.classes, self.cluster)
        self.memory = device_memory(recipe, self.backbone, self.share, self.head)
        self.checkpoint = CheckpointCost.of(recipe, self.backbone, self.head, request.storage)
        self.samples = num_samples(recipe, manifest, request.samples)
        vectors, sample_list = data_bytes(recipe, manifest, request.samples, self.classes)
        copied = self.checkpoint.of_rank * recipe.checkpoint.in_background
        if machine.kind == "cuda" and copied:  # torch rounds pinned memory up to a power of two
            copied = 1 << (copied - 1).bit_length()
        others: dict[str, tuple[int, ...]] = {
            "label vectors": (0, vectors, vectors),
            "list of samples": (0, 0, sample_list),
            "checkpoint being written": (0, 0, copied),
        }
        capacity = request.host_bytes
        if capacity is None and machine.kind == "cpu":
            capacity = machine.memory * request.gpus
        class_bytes = class_list_bytes(manifest)
        self.host = host_memory(
            self.head, self.memory, others, class_bytes=class_bytes, capacity=capacity
        )

    def _backbone(self, known: Sequence[BackboneCost]) -> BackboneCost:
        train, ranks = self.recipe.train, self.cluster.ranks
        share = -(-train.global_batch // ranks)
        rows = -(-share // min(train.micro_batches, share))
        for cost in known:
            if cost.rows == rows:
                return cost
        if len(known) > 1:
            return known[0].at(rows, known[1])
        is_cuda = self.cluster.machine.kind == "cuda"
        return trace_backbone(self.recipe, rows=rows, ranks=ranks, cuda=is_cuda)

    @cached_property
    def collectives(self) -> list[Collective]:
        return step_collectives(self.recipe, self.backbone, self.head)

    @cached_property
    def work(self) -> dict[Phase, Counter[Work]]:
        return step_work(self.recipe, self.backbone, self.share, self.head)

    @cached_property
    def phases(self) -> list[PhaseTime]:
        return [*phase_times(self.work, self.collectives, self.cluster, self.recipe)]

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per step."""
        return sum(map(self.cluster.sent, self.collectives))

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank per step."""
        return sum(each.flops * n for counter in self.work.values() for each, n in counter.items())

    @property
    def steps(self) -> int | None:
        train = self.recipe.train
        if self.samples is None:
            return train.duration.steps
        return train.duration.in_steps(num_samples=self.samples, global_batch=train.global_batch)
