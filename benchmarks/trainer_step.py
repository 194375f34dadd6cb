"""A step of the trainer compared with a bare training loop of the same model.

The difference is the cost of the sample order, agreement between ranks, telemetry and checks. Data
are held in memory, and there is one process.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from benchmarks.timing import Row, ratio_row, take_turns
from data.loading.batch import Batch, Cursor
from data.loading.loader import EndlessLoader
from heads.collectives import collective_hook
from trainer.agreement import Agreement
from trainer.checkpoints import CheckpointWriter
from trainer.config import Recipe
from trainer.faults import Watchdog
from trainer.process.signals import StopSignals
from trainer.recipe import build_recipe
from trainer.run.folder import RunFolder
from trainer.run.state import TrainState, provenance
from trainer.run.training_data import RunData
from trainer.schedules import RunLength
from trainer.task import Task, build_task
from trainer.telemetry.phases import Phases
from trainer.telemetry.telemetry import Telemetry
from trainer.train import Run, take_steps
from trainer.world import World, open_world

STEPS, SECONDS = 20, 120.0
_BATCH, CLASSES, _SIDE = 64, 1000, 32
CASE = f"ResNet with 10 layers, {_BATCH} images of {_SIDE} x {_SIDE}, {CLASSES} classes"
_NETWORK = {
    "model_type": "resnet",
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128, 256],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}


class InMemory:
    """A loader that repeats one batch."""

    def __init__(self, batch: Batch) -> None:
        self.cursor, self.batch = Cursor(0), batch

    def __next__(self) -> Batch:
        return self.batch

    def add_bad(self, bad: list[int]) -> None:
        del bad


def rows() -> Iterator[Row]:
    """Compare the two loops, `STEPS` steps each."""
    with tempfile.TemporaryDirectory() as folder, open_world("cpu") as world, ExitStack() as opened:
        recipe = network_recipe(Path(folder))
        loader = InMemory(random_batch())
        task, steps = open_trainer(recipe, world, loader, opened, num_classes=CLASSES)
        found = take_turns(
            {"trainer": lambda: steps(STEPS), "bare": _bare(task, loader.batch)},
            title="trainer step",
            seconds=SECONDS,
        )
    yield ratio_row("trainer step / bare loop", CASE, found["trainer"], found["bare"], 1.02)


def random_batch() -> Batch:
    pixels = torch.randint(256, (_BATCH, 3, _SIDE, _SIDE), dtype=torch.uint8)
    return Batch({"pixel_values": pixels}, torch.randint(CLASSES, (_BATCH,)), torch.arange(_BATCH))


def network_recipe(folder: Path) -> Recipe:
    tree = {
        "run": str(folder / "run"),
        "data": {"shards": "none", "image": {"size": _SIDE}},
        "backbone": {"config": _NETWORK},
        "optimizer": {"kind": "sgd", "lr": 0.01},
        "train": {"global_batch": _BATCH, "duration": {"steps": 10**9}, "clip_norm": 1.0},
        "checkpoint": {"every": {"steps": 10**9}},
        "telemetry": {"log_every": 10},
    }
    return build_recipe(tree, origin="benchmark")


def _bare(task: Task, batch: Batch) -> Callable[[], None]:
    """Return a plain PyTorch training loop with gradient clipping.

    It shares its modules with the trainer: a copy at other memory addresses can be up to 8% faster
    or slower.
    """
    parameters = list(task.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)

    def loop() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = task.head(task.backbone(batch.inputs), batch.labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

    return loop


def open_trainer(
    recipe: Recipe, world: World, loader: InMemory, opened: ExitStack, *, num_classes: int
) -> tuple[Task, Callable[[int], None]]:
    """Return a task, and a function that runs a given number of its steps without evaluations or
    checkpoints."""
    phases = Phases(world.device)
    folder = RunFolder(recipe.run)
    folder.path.mkdir()
    opened.enter_context(collective_hook(phases.collective))
    names = [f"class {label}" for label in range(num_classes)]
    task = build_task(recipe, class_names=names, label_vectors=None, world=world, phases=phases)
    task.train().start_training()
    agreement = opened.enter_context(Agreement(world))
    state = TrainState(
        step=0,
        cursor=loader.cursor,
        tree="",
        data="",
        tokenizer=None,
        origin=provenance(recipe),
    )
    length = RunLength(10**9, 10**6, recipe.train.global_batch)
    telemetry = Telemetry(
        folder.path,
        recipe.telemetry,
        world,
        start_step=0,
        num_steps=length.num_steps,
        global_batch=length.global_batch,
        checkpoint_every=length.num_steps,
        phases=phases,
    )
    writer = CheckpointWriter(folder.checkpoints, recipe.checkpoint, world, start_step=0)
    run = Run(
        task=task,
        data=cast(RunData, None),  # there is no evaluation
        length=length,
        loader=cast(EndlessLoader, loader),
        stop=opened.enter_context(StopSignals()),
        watchdog=opened.enter_context(Watchdog(world, timeout_seconds=600, phases=phases)),
        agreement=agreement,
        telemetry=opened.enter_context(telemetry),
        writer=opened.enter_context(writer),
        state=state,
        saved_step=0,
    )

    def steps(number: int) -> None:
        # Mark the evaluation and the checkpoint at `end` as done, so that only steps are timed.
        end = run.state.step + number
        run.state, run.saved_step = replace(run.state, evaluated=end), end
        take_steps(run, end)

    return task, steps
