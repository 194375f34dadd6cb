"""Measures the collectives and the persistent and peak memory of a training step on this rank."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.loading.batch import Batch, Mixed
from tests.ranks import rank_world
from trainer.agreement import agree
from trainer.config import Recipe
from trainer.step import clip_gradients, compute_gradients, set_rates, update_weights
from trainer.task import Task, build_task

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}


class CollectiveRecorder(TorchDispatchMode):
    """Records the bytes of c10d collectives by (kind, group), including those called from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.names: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Any) -> None:
        if name in ("barrier", "monitored_barrier_"):
            return
        kind = _KINDS[name]
        group = next(a for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        group_name = self.names.get(ProcessGroup.unbox(group).group_name, "world")
        tensors = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)]
        if kind == "reduce_scatter":
            tensors = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
        size = sum(t.numel() * t.itemsize for t in tensors)
        self.bytes[kind, group_name] += size


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


def measure_steps(work: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Call `measure_step` for every item in one process, so that each rank starts only once."""
    return [measure_step(*each) for each in work]


def measure_step(
    recipe: Recipe, class_ranks: int, num_classes: int, label_vectors: np.ndarray
) -> dict[str, Any]:
    """Run two warm-up steps, one step that records collectives, and one step that records
    memory."""
    world = rank_world(class_ranks)
    task = build_task(
        recipe,
        class_names=[str(i) for i in range(num_classes)],
        label_vectors=label_vectors,
        world=world,
    )
    task.train()
    task.start_training()
    set_rates(task, 1.0)
    batch = random_batch(recipe, num_classes, recipe.train.global_batch // world.size)
    for step in (1, 2):
        _step(task, batch, step)
    recorder = CollectiveRecorder()
    if world.mesh is not None:
        for axis in ("data", "class"):
            recorder.names[world.mesh.get_group(axis).group_name] = axis
    with recorder:
        _step(task, batch, 3)
    persistent = _persistent_bytes(task)
    with profile(profile_memory=True) as profiler:
        _step(task, batch, 4)
    return {
        "collectives": [(*key, size) for key, size in recorder.bytes.items()],
        "persistent": persistent,
        "peak": _peak(profiler),
    }


def _step(task: Task, batch: Batch, step: int) -> None:
    agree(task.world, stop=None, batch=batch)
    compute_gradients(task, batch, step=step)
    clip_gradients(task, task.recipe.train.clip_norm)
    update_weights(task, step=step)


def random_batch(recipe: Recipe, num_classes: int, rows: int) -> Batch:
    labels = torch.arange(rows) % num_classes
    if recipe.data.text is not None:
        tokens = torch.ones(rows, recipe.data.text.max_length, dtype=torch.int64)
        inputs = {"input_ids": tokens, "attention_mask": tokens.clone()}
    else:
        image = recipe.data.image
        shape = (rows, image.channels, image.size, image.size)
        inputs = {"pixel_values": torch.randint(0, 256, shape, dtype=torch.uint8)}
    mixed = None
    if recipe.data.augment.mix is not None:
        mixed = Mixed(labels.roll(1), torch.full((rows,), 0.5))
    return Batch(inputs, labels, torch.arange(rows), mixed)


def _persistent_bytes(task: Task) -> dict[str, int]:
    """Return the bytes of this rank's tensors that persist between steps."""
    optimizers = [task.strategy.optimizer, task.head_optimizer]
    moments = [
        value
        for optimizer in optimizers
        if optimizer is not None
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    return {
        "backbone": _bytes(list(task.strategy.live().values())),
        "head": _bytes([p.detach() for p in task.head.parameters()]),
        "moments": _bytes([getattr(m, "_local_tensor", m) for m in moments]),
        "averages": 0 if task.average is None else _bytes(list(task.average.averages.values())),
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _peak(profiler: Any) -> int:
    """Return the peak number of allocated bytes, relative to the start of the step."""
    now = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
