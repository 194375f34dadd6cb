"""Measures the training step of ResNet-50 and of multilingual BERT, compared with a bare loop."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.tasks import TaskSize, bare_loop, random_batch, recipe_of
from benchmarks.timing import Row, allocated_bytes, free, peak_bytes, ratio_row, take_turns_on
from benchmarks.trainer import InMemory, open_trainer
from trainer.world import World

_WARM_UP, _TIMED_STEPS = 3, 10


def step(
    kind: dict[str, Any], size: TaskSize, device: torch.device, seconds: float
) -> Iterator[Row]:
    """Measure steps of the training loop and of a bare loop, in turn, on one batch.

    The memory is the peak of a step of the trainer, with weights and moments, before the bare loop
    exists.
    """
    torch.manual_seed(0)
    deferred = {"train": {**kind.get("train", {}), "synchronous": False}}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        recipe = recipe_of(kind, size, deferred, run=Path(folder) / "run")
        world = World(0, 1, 0, 1, device, None)
        batch = random_batch(recipe, size.classes, device)
        before = allocated_bytes(device)
        _, steps = open_trainer(recipe, world, InMemory(batch), opened, num_classes=size.classes)
        steps(_WARM_UP)
        memory = allocated_bytes(device) - before
        memory += peak_bytes(lambda: steps(2), device)
        bare = bare_loop(recipe, batch, size.classes)
        bare(_WARM_UP)
        contenders = {"trainer": lambda: steps(_TIMED_STEPS), "bare": lambda: bare(_TIMED_STEPS)}
        found = take_turns_on(device, contenders, seconds=seconds)
    free(device)
    case = f"{size.encoder['model_type']}, batch {size.batch}"
    yield ratio_row("trainer step / bare loop", case, found["trainer"], found["bare"], 1.02)
    each = float(np.median(found["trainer"])) / _TIMED_STEPS
    yield Row("samples per second of the trainer", case, f"{size.batch / each:,.0f}")
    yield Row("peak memory of a step", case, f"{memory / 1e9:.2f} GB")
