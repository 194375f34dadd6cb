"""Tasks on random inputs, and traces of their steps."""

from typing import Any

import torch

from benchmarks.gpu.__main__ import TOY
from benchmarks.gpu.tasks import TaskSize, random_batch, recipe_of
from tests.gpu.trace import Trace, traced
from trainer.step import read_numbers, take_step
from trainer.task import Task, build_task
from trainer.world import World

TINY = TOY.images
_WARM_UP = 3


def task_of(
    kind: dict[str, Any],
    size: TaskSize,
    device: torch.device,
    changes: dict[str, Any],
    world: World | None = None,
) -> Task:
    """Return a task in training mode, in one process unless `world` is given."""
    recipe = recipe_of(kind, size, changes)
    generator = torch.Generator().manual_seed(0)
    task = build_task(
        recipe,
        class_names=[f"class {label}" for label in range(size.classes)],
        label_vectors=torch.randn(size.classes, 8, generator=generator).numpy(),
        world=world or World(0, 1, 0, 1, device, None),
        class_counts=torch.arange(1, size.classes + 1).numpy(),
    )
    task.start_training()
    return task.train()


def trace_steps(task: Task, num_steps: int) -> Trace:
    """Trace the steps of a task on a random batch. As in `trainer/train.py`, the numbers of a step
    are read after the next one is launched; those of the last step are read after the trace."""
    batch = random_batch(task.recipe, task.head.num_classes, task.world.device)
    launched = take_step(task, batch, 1.0, step=1)
    for step in range(2, 2 + _WARM_UP):
        read_numbers(task, launched)
        launched = take_step(task, batch, 1.0, step=step)

    def steps() -> None:
        nonlocal launched
        for step in range(10, 10 + num_steps):
            taken = take_step(task, batch, 1.0, step=step)
            read_numbers(task, launched)
            launched = taken

    trace = traced(steps, task.world.device, with_stack=True)
    read_numbers(task, launched)
    return trace
