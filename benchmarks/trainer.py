"""The trainer against a bare loop, checkpoints and imports: `python -m benchmarks.trainer`.

The data of a step are in memory, and there is one process, so the difference to the bare loop is
the cost of the sample order, agreement between ranks, telemetry and checks.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu.tasks import TaskSize, random_batch, recipe_of
from benchmarks.timing import (
    Row,
    Sections,
    allocated_bytes,
    command_line,
    free,
    peak_bytes,
    ratio_row,
    report,
    take_turns_on,
)
from data.loading.batch import Batch, Cursor
from data.loading.loader import EndlessLoader
from heads.collectives import collective_hook
from trainer.agreement import Agreement
from trainer.checkpoints import CheckpointWriter
from trainer.config import CheckpointConfig, Recipe
from trainer.faults import Watchdog
from trainer.process.signals import StopSignals
from trainer.run.folder import RunFolder
from trainer.run.state import TrainState, provenance
from trainer.run.training_data import RunData
from trainer.schedules import RunLength
from trainer.task import Task, build_task
from trainer.telemetry.phases import Phases
from trainer.telemetry.telemetry import Telemetry
from trainer.train import Run, take_steps
from trainer.world import World

STEPS, SECONDS = 10, 120.0
SIZE = TaskSize(
    {
        "model_type": "resnet",
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 128, 256],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
    },
    classes=1000,
    batch=64,
    side=32,
)
STATE_BYTES, ROUNDS = 200 * 2**20, 9
_WARM_UP, _NUM_TENSORS, _NUM_PRODUCTS, _NUM_IMPORTS = 3, 40, 20, 5


def step() -> Iterator[Row]:
    """Compare the training loop with a bare one on the CPU."""
    kind = {"optimizer": {"kind": "sgd", "lr": 0.01}, "train": {"clip_norm": 1.0}}
    yield from compared(kind, SIZE, torch.device("cpu"), precision="fp32", seconds=SECONDS)


def compared(
    kind: dict[str, Any], size: TaskSize, device: torch.device, *, precision: str, seconds: float
) -> Iterator[Row]:
    """Measure `STEPS` steps of the training loop and of a bare loop, in turn, on one batch.

    The memory is the peak of a step of the trainer, with weights and moments, before the bare loop
    exists.
    """
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        recipe = recipe_of(kind, size, {}, precision=precision, run=Path(folder) / "run")
        world = World(0, 1, 0, 1, device, None)
        batch = random_batch(recipe, size.classes, device)
        before = allocated_bytes(device)
        task, steps = open_trainer(recipe, world, InMemory(batch), opened, num_classes=size.classes)
        steps(_WARM_UP)
        memory = allocated_bytes(device) - before
        memory += peak_bytes(lambda: steps(2), device)
        bare = bare_loop(task, batch)
        bare(_WARM_UP)
        contenders = {"trainer": lambda: steps(STEPS), "bare": lambda: bare(STEPS)}
        found = take_turns_on(device, contenders, seconds=seconds)
    free(device)
    case = f"{size.encoder['model_type']}, batch {size.batch}, {size.classes:,} classes"
    yield ratio_row("trainer step / bare loop", case, found["trainer"], found["bare"], 1.02)
    each = float(np.median(found["trainer"])) / STEPS
    yield Row("samples per second of the trainer", case, f"{size.batch / each:,.0f}")
    yield Row("peak memory of a step", case, f"{memory / 1e9:.2f} GB")


class InMemory:
    """A loader that repeats one batch."""

    def __init__(self, batch: Batch) -> None:
        self.cursor, self.batch = Cursor(0), batch

    def __next__(self) -> Batch:
        return self.batch

    def add_bad(self, bad: list[int]) -> None:
        del bad


def bare_loop(task: Task, batch: Batch) -> Callable[[int], None]:
    """Return a function that takes steps of a plain PyTorch training loop on one batch, with the
    optimizer, precision and clipping of the recipe. It does not check the loss.

    It shares its modules with the trainer: on a CPU, a copy at other memory addresses can be up to
    8% faster or slower.
    """
    parameters, train = list(task.parameters()), task.recipe.train
    optimizer = task.recipe.optimizer.build([{"params": parameters}])

    def loop(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            with task.autocast():
                features = task.backbone(batch.inputs)
                loss = task.head(features, batch.labels, rows_of_ranks=[batch.num_rows])
            loss.backward()
            if train.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, train.clip_norm)
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


def checkpoints() -> Iterator[Row]:
    """Measure how long a background save of a checkpoint stalls training, relative to a synchronous
    save."""
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    entries = {
        f"backbone.{number}": torch.randn(STATE_BYTES // 4 // _NUM_TENSORS // 1024, 1024)
        for number in range(_NUM_TENSORS)
    }
    matrix = torch.randn(512, 512)
    found: dict[str, list[float]] = {}

    def clock(name: str, part: Callable[[], object]) -> None:
        started = time.perf_counter()
        part()
        found.setdefault(name, []).append(time.perf_counter() - started)

    def products() -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.mm(matrix, matrix)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:  # on the disk of TMPDIR
        waited, background = (
            opened.enter_context(
                CheckpointWriter(
                    Path(folder) / str(in_background),
                    CheckpointConfig(keep_last=1, in_background=in_background),
                    world,
                    start_step=0,
                )
            )
            for in_background in (False, True)
        )
        for number in range(ROUNDS + 1):
            state = {"step": number}
            clock("sync", partial(waited.save, entries, state))
            clock("products", products)
            clock("stall", partial(background.save, entries, state))
            clock("busy products", products)
            background.finish()
    times = {name: np.array(each[1:]) for name, each in found.items()}  # without a warm-up round
    case = f"{STATE_BYTES >> 20} MB, one rank"
    what = "stall of a background save / synchronous save"
    yield ratio_row(what, case, times["stall"], times["sync"], 0.10)
    what = f"{_NUM_PRODUCTS} products during a background save / without a save"
    yield ratio_row(what, case, times["busy products"], times["products"])


def imports() -> Iterator[Row]:
    """Measure the CPU time of the imports of a rank, and of torch alone, each in new processes."""
    found: dict[str, list[float]] = {"trainer.train": [], "torch": []}
    for _ in range(_NUM_IMPORTS):
        for module, seconds in found.items():
            code = f"import time, {module}; print(time.process_time())"
            done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
            seconds.append(json.loads(done.stdout))
    ours, alone = (float(np.median(seconds)) for seconds in found.values())
    details = f"torch alone {alone:.1f}, medians of {_NUM_IMPORTS}"
    yield Row("import of trainer.train", "CPU-seconds", f"{ours:.1f}", "<= 3.5", details)


SECTIONS: Sections = {"step": step, "checkpoints": checkpoints, "imports": imports}

if __name__ == "__main__":
    report(command_line("trainer", __doc__).parse_args(), SECTIONS)
