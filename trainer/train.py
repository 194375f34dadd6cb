"""Training, top to bottom: the guided tour of the trainer.

`train` is the whole story of a run. Everything it calls lives in the module of its name.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data import (
    Batch,
    Cursor,
    Manifest,
    Split,
    TrainLoader,
    open_split,
)
from trainer.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_tensors,
    restore_random_state,
    save_checkpoint,
)
from trainer.config import Duration, Recipe
from trainer.evaluation import evaluate_split, save_evaluation
from trainer.optimizer import build_optimizer, rate_at, set_rate
from trainer.run import RunFolder
from trainer.task import Task, build_task
from trainer.telemetry import Telemetry
from trainer.trained import class_counts_of, label_vectors_of
from trainer.world import World


def train(recipe: Recipe, world: World) -> None:
    """Train a recipe to its end, from its newest checkpoint if there is one (collective).

    Raises ValueError and OSError for what a user can mend, FloatingPointError on every rank and
    before the update when the loss or its gradient is not finite.
    """
    run = RunFolder(recipe.run)

    # ---------------------------------------------------------------- data
    manifest = Manifest.load(recipe.data.shards)
    split = open_split(recipe.data.shards, recipe.data.train_split)
    manifest.of_split(recipe.data.eval_split)  # said now, not after the last step
    label_vectors = label_vectors_of(recipe, manifest)
    global_batch = recipe.train.global_batch

    def steps(duration: Duration) -> int:
        return duration.in_steps(num_samples=len(split), global_batch=global_batch)

    num_steps = steps(recipe.train.duration)

    # ---------------------------------------------------------------- model
    task = build_task(
        recipe,
        num_classes=split.num_classes,
        label_vectors=label_vectors,
        world=world,
        class_counts=class_counts_of(recipe, manifest),
    )
    optimizer = build_optimizer(recipe.optimizer, task)
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    task.train()

    # ---------------------------------------------------------------- resume
    if world.is_main:
        run.claim(recipe)
    world.barrier()
    state = TrainState(step=0, cursor=Cursor(recipe.seed), tree=task.head.tree.digest())
    checkpoint, refused = find_checkpoint(run.checkpoints, world)
    if checkpoint is not None:
        task.create_optimizer_state(optimizer)
        state = state.resumed(checkpoint)
        load_tensors(checkpoint, task.checkpoint_entries(optimizer), world)
        restore_random_state(checkpoint, world, seed=recipe.seed)

    # ---------------------------------------------------------------- steps
    telemetry = Telemetry(
        run.path,
        recipe.telemetry,
        world,
        start_step=state.step,
        num_steps=num_steps,
        global_batch=global_batch,
    )
    loader = TrainLoader(
        split,
        recipe.data,
        global_batch=global_batch,
        rank=world.rank,
        world_size=world.size,
        cursor=state.cursor,
    )
    evaluation_step = None
    with telemetry, loader, SampleLog(run.path, recipe, world, state.step) as sample_log:
        for line in refused:
            telemetry.say(f"refused {line}")
        telemetry.say(_introduction(recipe, task, split, world, state.step, num_steps))
        for step in range(state.step + 1, num_steps + 1):
            started = time.perf_counter()
            batch = next(loader)
            telemetry.waited(time.perf_counter() - started)

            rate = rate_at(
                step - 1,
                peak=recipe.optimizer.lr,
                schedule=recipe.schedule,
                num_steps=num_steps,
                num_samples=len(split),
                global_batch=global_batch,
            )
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            loss = task.backward(batch)
            norm = task.clip_gradients(recipe.train.clip_norm)
            _check_finite(step, float(loss), float(norm))
            optimizer.step()
            assert batch.cursor is not None
            state = TrainState(step, batch.cursor, state.tree)
            sample_log.write(step, batch)

            if telemetry.is_due(step):
                telemetry.step(
                    step, loss=float(loss), learning_rate=rate, gradient_norm=float(norm)
                )
            if step == num_steps or step % max(1, steps(recipe.checkpoint.every)) == 0:
                with telemetry.pause():
                    _save(run, task, optimizer, state, recipe, world, telemetry)
            if recipe.evaluation.every and step % max(1, steps(recipe.evaluation.every)) == 0:
                with telemetry.pause():
                    _evaluate(run, task, step, recipe, world, label_vectors, telemetry)
                evaluation_step = step

        # ------------------------------------------------------------ the end
        if evaluation_step != num_steps:
            _evaluate(run, task, num_steps, recipe, world, label_vectors, telemetry)


@dataclass(frozen=True)
class TrainState:
    """What a run is at, besides its tensors and random states."""

    step: int
    cursor: Cursor
    tree: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "cursor": self.cursor.to_json(), "tree": self.tree}

    def resumed(self, checkpoint: Checkpoint) -> "TrainState":
        """The state in a checkpoint; ValueError where its label tree is not this run's."""
        saved = checkpoint.state
        if saved["tree"] != self.tree:
            raise ValueError(
                f"checkpoint {checkpoint.folder} has another label tree: its shards had other "
                "classes or label vectors; point data.shards at those, or start another run folder"
            )
        return TrainState(saved["step"], Cursor.from_json(saved["cursor"]), self.tree)


class SampleLog:
    """If asked for, the ids of every step's samples, a file a rank: what an audit needs."""

    def __init__(self, run: Path, recipe: Recipe, world: World, start_step: int) -> None:
        self.path = run / f"samples-rank{world.rank}.jsonl" if recipe.telemetry.sample_ids else None
        if self.path is not None:
            kept = []
            if self.path.exists():
                lines = self.path.read_text(encoding="utf-8").splitlines()
                kept = [line for line in lines if _step_of(line) <= start_step]
            self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def __enter__(self) -> "SampleLog":
        self.file = self.path.open("a", encoding="utf-8") if self.path else None
        return self

    def write(self, step: int, batch: Batch) -> None:
        if self.file is not None:
            record = {"step": step, "samples": batch.indices.tolist()}
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _evaluate(
    run: RunFolder,
    task: Task,
    step: int,
    recipe: Recipe,
    world: World,
    label_vectors: np.ndarray | None,
    telemetry: Telemetry,
) -> None:
    result = evaluate_split(task, recipe, world, label_vectors=label_vectors)
    if world.is_main:
        save_evaluation(run.evaluations, result, step=step)
    numbers = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    line = f"evaluation at step {step} on {result.num_samples} samples: {numbers}"
    telemetry.event("evaluation", step, line, **result.metrics)


def _save(
    run: RunFolder,
    task: Task,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    recipe: Recipe,
    world: World,
    telemetry: Telemetry,
) -> None:
    folder = save_checkpoint(
        run.checkpoints,
        task.checkpoint_entries(optimizer),
        state.to_json(),
        world,
        keep=recipe.checkpoint.keep,
    )
    telemetry.event("checkpoint", state.step, f"checkpoint {folder}", folder=str(folder))


def _check_finite(step: int, loss: float, norm: float) -> None:
    """Loss and norm are the same numbers on every rank, so all of them stop together."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}; the update was not "
            "made: lower optimizer.lr, lengthen schedule.warmup or set train.clip_norm"
        )


def _introduction(
    recipe: Recipe, task: Task, split: Split, world: World, start_step: int, num_steps: int
) -> str:
    weights = sum(parameter.numel() for parameter in task.backbone.parameters())
    nodes, columns = task.head.tree.num_nodes, task.head.dim + task.head.bias
    start = f", from step {start_step}" if start_step else ""
    return (
        f"{recipe.run}: {len(split)} samples, {split.num_classes} classes; backbone {weights} "
        f"weights, head {recipe.head.weights.kind} x {recipe.head.loss.kind} "
        f"{nodes} x {columns}; {world.size} x {world.device.type}; {num_steps} steps of "
        f"{recipe.train.global_batch}{start}"
    )


def _step_of(line: str) -> float:
    try:
        step: int = json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf  # the last line of a killed run may be cut
    return step
