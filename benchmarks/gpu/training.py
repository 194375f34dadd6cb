"""Measures the training step: synchronizations, and throughput compared with a bare loop."""

import tempfile
from collections import Counter
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measuring import allocated_bytes, free, measure, peak_bytes, world_of_one_rank
from benchmarks.gpu.sizes import Size, TaskSize
from benchmarks.gpu.tasks import IMAGES, TEXTS, bare_loop, random_batch, recipe_of, task_of
from benchmarks.gpu.trace import Trace, traced
from benchmarks.trainer_step import InMemory, open_trainer
from heads.losses import LOSSES
from trainer.step import read_numbers, take_step
from trainer.task import Task
from trainer.telemetry.mfu import ModelFlops, peak_flops
from trainer.world import World

_WARM_UP = 3
_TIMED_STEPS = 10


def synchronizations(size: Size, device: torch.device) -> dict[str, Any]:
    """Count the synchronizations of deferred steps under ddp and fsdp, in process groups of one
    rank, for every loss that computes the logits of all classes."""
    kinds = [kind for kind, loss in LOSSES.items() if not loss.over_nodes]
    cases: list[dict[str, Any]] = []
    with world_of_one_rank(device) as world:
        for strategy, kind in product(("ddp", "fsdp"), size.losses or kinds):
            cases.append(_counted(size, world, strategy, kind))
    return {"cases": cases, "steps": size.traced_steps}


def _counted(size: Size, world: World, strategy: str, kind: str) -> dict[str, Any]:
    changes = {
        "train": {"strategy": {"kind": strategy}, "synchronous": False, "clip_norm": 1.0},
        "head": {"loss": {"kind": kind}},
        "backbone": {"batch_norm": "local"},
    }
    task = task_of(IMAGES, size.tiny, world.device, changes, world)
    trace = trace_steps(task, size.traced_steps)
    task.close()
    return {"strategy": strategy, "loss": kind, **_numbers(trace, size.traced_steps)}


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


def _numbers(trace: Trace, num_steps: int) -> dict[str, Any]:
    sites: Counter[str] = trace.synchronizations()
    return {
        "synchronizations_per_step": sites.total() / num_steps,
        "sites": dict(sites.most_common(20)),
        "launches_per_step": trace.launches() / num_steps,
    }


def images(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure ResNet-50 with 1,000 classes."""
    return _throughput(IMAGES, size.images, size, device)


def texts(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure multilingual BERT with 1,000 classes."""
    return _throughput(TEXTS, size.texts, size, device)


def _throughput(
    kind: dict[str, Any], shape: TaskSize, size: Size, device: torch.device
) -> dict[str, Any]:
    """Measure steps of the training loop and of a bare loop, in turn, on one batch.

    The memory is the peak of a step of the trainer, with weights and moments, before the bare loop
    exists.
    """
    torch.manual_seed(0)
    deferred = {"train": {**kind.get("train", {}), "synchronous": False}}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        recipe = recipe_of(kind, shape, deferred, run=Path(folder) / "run")
        world = World(0, 1, 0, 1, device, None)
        batch = random_batch(recipe, shape.classes, device)
        before = allocated_bytes(device)
        _, steps = open_trainer(recipe, world, InMemory(batch), opened, num_classes=shape.classes)
        steps(_WARM_UP)
        memory = allocated_bytes(device) - before
        memory += peak_bytes(lambda: steps(2), device)
        bare = bare_loop(recipe, batch, shape.classes)
        bare(_WARM_UP)
        number = _TIMED_STEPS if size.name == "full" else 2
        found = measure(
            {"trainer": lambda: steps(number), "bare loop": lambda: bare(number)},
            device,
            seconds=2 * size.seconds,
        )
        plain, with_stack = (
            traced(lambda: steps(size.traced_steps), device, with_stack=each)
            for each in (False, True)
        )
    free(device)
    ratios = [
        ours / theirs
        for ours, theirs in zip(*(each["rounds"] for each in found.values()), strict=True)
    ]
    seconds = {name: each["seconds"] / number for name, each in found.items()}
    per_row = ModelFlops(recipe, shape.classes).per_row(batch.inputs)
    peak = peak_flops(device, "bf16", None)
    return {
        "batch": shape.batch,
        "step_seconds": seconds,
        "samples_per_second": {name: shape.batch / each for name, each in seconds.items()},
        "ratio": float(torch.tensor(ratios).median()),
        "flops_per_sample": per_row,
        "mfu": None
        if peak is None or per_row is None
        else per_row * shape.batch / seconds["trainer"] / peak,
        "memory_bytes": memory,
        "idle_share": plain.idle_share(),
        **_numbers(with_stack, size.traced_steps),
    }
