"""Runs the trainer's own step on fake tensors, and records the operations of each phase.

Everything but the backbone is the trainer's code for the recipe: micro-batches, head, collectives,
clipping, optimizers, moving averages. `backbone_cost.py` records the operations of the backbone; a
module with the same weights replaces it here.

Two things keep the run short. A mesh axis has at most two ranks, because more ranks only enlarge
the tensors that are exchanged. If the head has many blocks of classes, the step runs with few of
them. All others are like the last full block, whose operations are the difference between two runs.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from data.loading.batch import Batch, Mixed
from heads import LabelTree, build_head
from heads.config import HeadConfig
from heads.losses import ClassFacts
from launch.plan.backbone_cost import BackboneCost
from launch.plan.classes import Classes
from launch.plan.cluster import Cluster
from launch.plan.fake_world import fake_world
from launch.plan.head_cost import HeadShape
from launch.plan.operations import HostReads, OperationRecorder, Operations
from launch.plan.tile_traffic import with_tiles
from trainer.checkpoints.entries import create_moments
from trainer.config import Recipe
from trainer.step import loss_scale_of, take_step
from trainer.strategies.base import Strategy, StrategyKind
from trainer.strategies.cost import Phase
from trainer.task import Task
from trainer.telemetry.phases import Phases
from trainer.world import World

_CPU = torch.device("cpu")
# The blocks of a run that forward does not save: a full one and the last, which may be smaller.
_BLOCKS_AFTER_SAVED = 2
_VECTOR_DIM = 300
# The work of a step of the factored head does not depend on the number of classes.
_CLASSES_OF_FACTORED_HEAD = 64


@dataclass(frozen=True)
class StepOperations:
    """The operations of a step on one rank, by phase, without those of the backbone.

    defers: whether the host launches a step before it has read the results of the previous one.
    block: the operations of a class block in forward and backward; empty if the run contains all
    blocks of the head.
    """

    phases: dict[Phase, Operations]
    defers: bool
    block: Operations

    @property
    def block_launches(self) -> int:
        """The number of kernels that the host launches for a class block."""
        return sum(operation.launches * number for operation, number in self.block.items())


def record_step(
    recipe: Recipe,
    backbone: BackboneCost,
    head: HeadShape,
    cluster: Cluster,
    *,
    adds_parts: bool = False,
) -> StepOperations:
    """Return the operations of one step. `recipe` is the recipe of the planned run, and
    `adds_parts` is that of `Spread`."""
    step = _without_tiles(recipe, backbone, head, cluster, adds_parts=adds_parts)
    loss, machine = recipe.head.loss, cluster.machine
    is_sampled = loss.sampled(head.classes.num_classes, head.world_rows) is not None
    if not recipe.head.tiles or loss.tile is None or is_sampled or machine.kind != "cuda":
        return step
    rows = _Trial(recipe, backbone, head, cluster, adds_parts).group_rows
    of_head = with_tiles(step.phases["head"], rows, head, machine, loss.tile)
    block = with_tiles(step.block, rows, head, machine, loss.tile, one_block=True)
    return replace(
        step,
        phases=step.phases | {"head": of_head},
        block=block if step.block else step.block,
    )


def _without_tiles(
    recipe: Recipe,
    backbone: BackboneCost,
    head: HeadShape,
    cluster: Cluster,
    *,
    adds_parts: bool,
) -> StepOperations:
    trial = _Trial(recipe, backbone, head, cluster, adds_parts)
    if recipe.head.weights.kind == "factored":
        return StepOperations(*trial.run(_CLASSES_OF_FACTORED_HEAD), Counter())
    in_trial = min(head.blocks, head.saved + _BLOCKS_AFTER_SAVED)
    more = head.blocks - in_trial
    few = head.computed - more * head.block_classes
    phases, defers = trial.run(few)
    if not more:
        return StepOperations(phases, defers, Counter())
    with_one_more, _ = trial.run(few + head.block_classes)
    block = Counter(with_one_more["head"])
    block.subtract(phases["head"])
    for phase, operations in phases.items():
        added = Counter(with_one_more[phase])
        added.subtract(operations)
        for operation, number in added.items():
            operations[operation] += more * number
    return StepOperations(phases, defers, Counter({op: n for op, n in block.items() if n}))


@dataclass(frozen=True)
class _Trial:
    recipe: Recipe
    backbone: BackboneCost
    head: HeadShape
    cluster: Cluster
    adds_parts: bool

    def run(self, classes_of_rank: int) -> tuple[dict[Phase, Operations], bool]:
        """Run a step in which each rank has this number of classes."""
        recorder = OperationRecorder()
        phases = RecordedPhases(recorder)
        num_classes = self._num_classes(classes_of_rank)
        config = self._head_config(num_classes)
        with fake_world(self._mesh) as world, FakeTensorMode(allow_non_fake_inputs=True):
            with recorder, HostReads(recorder):
                task = self._task(world, config, num_classes, phases)
                # Only the first step checks its inputs, and creates moments and loss scale.
                task.has_checked_inputs = True
                create_moments(task)
                loss_scale_of(task)
                batch = self._batch(task)
                if config.weights.kind == "factored":
                    take_step(task, batch, 1.0, step=1)  # sums the initial rows
                phases.clear()
                take_step(task, batch, 1.0, step=2)
            task.close()
        return phases.operations, task.defers

    @property
    def _mesh(self) -> tuple[int, int]:
        """Return the number of ranks along `data` and `class`. A tree is not sharded, because the
        classes of a rank would depend on its shape."""
        plain = self.head.classes.plain
        return min(2, self.cluster.data_ranks), min(2, self.cluster.class_ranks if plain else 1)

    @property
    def _copies(self) -> int:
        """Return how often the head processes each row of a batch."""
        return 2 if self.head.row_weights else 1

    @property
    def group_rows(self) -> int:
        """Return the rows of a class group, rounded up to the same number for each rank."""
        unit = self._mesh[1] * self._copies
        return -(-self.head.group_rows // unit) * unit

    def _num_classes(self, classes_of_rank: int) -> int:
        num, classes = classes_of_rank * self._mesh[1], self.head.classes
        if self.recipe.head.loss.over_nodes:  # the logits are those of the nodes
            return max(2, num * classes.num_classes // classes.nodes)
        return num

    def _head_config(self, num_classes: int) -> HeadConfig:
        """Return the recipe's head for this number of classes, with a prepared loss, torch
        operations and rows of zeros: drawing them would take longer than the step."""
        config = self.recipe.head
        loss = config.loss
        if not loss.over_nodes:
            vectors = torch.ones(1, _VECTOR_DIM).expand(num_classes, _VECTOR_DIM)
            loss = loss.prepare(ClassFacts(num_classes, torch.ones(num_classes), vectors))
        return config.model_copy(
            update={"num_classes": None, "loss": loss, "init_std": 0.0, "tiles": False}
        )

    def _task(self, world: World, config: HeadConfig, num_classes: int, phases: Phases) -> Task:
        classes, tree = self.head.classes, None
        if config.loss.over_nodes or not classes.plain:
            tree = tree_like(classes, num_classes)
        head = build_head(
            config,
            dim=self.backbone.dim,
            num_classes=num_classes,
            label_vectors=None,
            mesh=world.mesh,
            seed=0,
            device=_CPU,
            class_counts=np.ones(num_classes),
            tree=tree,
        )
        head.engine = replace(head.engine, processor=self.cluster.machine.processor)
        backbone: Any = _Weights(self.backbone, adds_parts=not self.adds_parts)
        task = Task(backbone, head, self._recipe(), world, phases)
        task.is_on_cuda = self.cluster.machine.kind == "cuda"
        task.train().start_training()
        return task

    def _recipe(self) -> Recipe:
        head, (data, class_) = self.head, self._mesh
        rows = self.group_rows // (class_ * self._copies)
        train = self.recipe.train.model_copy(
            update={
                "global_batch": head.calls * rows * data * class_,
                "strategy": _Undistributed(self.recipe.train.strategy),
                "channels_last": False,
                "compile": False,
                "activation_checkpointing": False,
            }
        )
        return self.recipe.model_copy(update={"train": train})

    def _batch(self, task: Task) -> Batch:
        rows = task.global_batch // task.world.size
        labels = torch.zeros(rows, dtype=torch.int64)
        mixed = Mixed(labels.clone(), torch.ones(rows)) if self.head.row_weights else None
        return Batch({"rows": torch.empty(rows, 1)}, labels, labels.clone(), mixed)


class RecordedPhases(Phases):
    """Phases that make a recorder add each operation to the current phase."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__(_CPU)
        self._recorder = recorder
        self.clear()

    def clear(self) -> None:
        self.operations: dict[Any, Operations] = {}
        self._recorder.operations = self.operations.setdefault("step", Counter())

    @contextmanager
    def __call__(self, name: Any) -> Iterator[None]:
        outer = self._recorder.operations
        self._recorder.operations = self.operations.setdefault(name, Counter())
        try:
            yield
        finally:
            self._recorder.operations = outer


class _Undistributed:
    """The options of a strategy, with a `start` that does not distribute the weights."""

    def __init__(self, kind: StrategyKind) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def start(self, backbone: Any, world: World) -> Strategy:
        del world
        return Strategy(backbone)


class _Weights(nn.Module):
    """The weights and buffers of a backbone. Forward and backward allocate their results without
    computing them.

    If `adds_parts` is false, only the first backward pass of a step returns gradients of the
    weights, because autograd would add them to the existing ones.
    """

    def __init__(self, cost: BackboneCost, *, adds_parts: bool) -> None:
        super().__init__()
        self.adds_parts = adds_parts
        self.encoder = nn.Module()
        self.dim = cost.dim
        self.dtype = {2: torch.bfloat16, 4: torch.float32}[cost.feature_itemsize]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in cost.shapes)
        for number, (shape, dtype) in enumerate(cost.buffer_shapes):
            self.register_buffer(f"buffer_{number}", torch.empty(shape, dtype=dtype))

    def to(self, *_: Any, **__: Any) -> "_Weights":
        return self  # torch cannot move fake parameters

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        weights = list(self.weights)
        if not self.adds_parts and weights[0].grad is not None:
            weights = []
            inputs = {"rows": inputs["rows"].requires_grad_()}
        features: Tensor = _Nothing.apply(inputs["rows"], self.dim, self.dtype, *weights)
        return features


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dim: int, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.weights = weights
        return rows.new_empty(len(rows), dim, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *map(torch.empty_like, ctx.weights))


def tree_like(classes: Classes, num_classes: int) -> LabelTree:
    """Return a tree whose inner nodes have as many children as those of `classes` have on average,
    and whose paths are at least as long on average."""
    children = max(2, round((classes.nodes - 1) / max(1, classes.inner)))
    if classes.nodes == classes.num_classes:  # every node has a class
        nodes = np.arange(num_classes)
        return LabelTree.from_parents(np.where(nodes, (nodes - 1) // children, -1), nodes)
    sizes = [num_classes]
    while sizes[-1] > 1 or len(sizes) < classes.depth:
        sizes.append(-(-sizes[-1] // children))
    starts = np.cumsum(sizes)
    parents = [
        start + np.arange(size) // children for start, size in zip(starts, sizes[:-1], strict=False)
    ]
    inner = np.full(starts[-1] - num_classes, -1)
    return LabelTree.from_parents(
        np.concatenate([*parents, [-1]]), np.concatenate([np.arange(num_classes), inner])
    )
