"""Measures the persistent and peak memory of a training step on this rank."""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from data.loading.batch import Batch, Mixed
from tests.ranks import rank_world
from tests.trainer.training import clip_gradients
from trainer.config import Recipe
from trainer.step import compute_gradients, set_rates, update_weights
from trainer.task import Task, build_task


def measure_steps(work: list[tuple[Recipe, int, int]]) -> list[dict[str, int]]:
    """Call `measure_step` for every item in one process, so that each rank starts only once."""
    return [measure_step(*each) for each in work]


def measure_step(recipe: Recipe, class_ranks: int, num_classes: int) -> dict[str, int]:
    """Run two warm-up steps and a step that records memory."""
    world = rank_world(class_ranks)
    names = [str(i) for i in range(num_classes)]
    task = build_task(recipe, class_names=names, label_vectors=None, world=world)
    task.train()
    task.start_training()
    set_rates(task, 1.0)
    batch = random_batch(recipe, num_classes, recipe.train.global_batch // world.size)
    for step in (1, 2):
        _step(task, batch, step)
    persistent = _persistent_bytes(task)
    with profile(profile_memory=True) as profiler:
        _step(task, batch, 3)
    return {**persistent, "peak": _peak(profiler)}


def _step(task: Task, batch: Batch, step: int) -> None:
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
        "head weights": _bytes([p.detach() for p in task.head.parameters()]),
        "optimizer moments": _bytes([getattr(m, "_local_tensor", m) for m in moments]),
        "moving averages": 0
        if task.average is None
        else _bytes(list(task.average.averages.values())),
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
