"""Training, top to bottom: the guided tour of the trainer.

`train` is the whole story of a run. Everything it calls lives in the module of its name.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
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
from data.config import DataConfig
from data.loading.stream import Stream, StreamLoader, open_stream
from heads.collectives import all_gather_equal, all_gather_rows
from trainer.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_tensors,
    restore_random_state,
    save_checkpoint,
)
from trainer.config import Duration, Recipe
from trainer.evaluation import evaluate_split, save_evaluation
from trainer.modality import check_modality, check_tokenizer, tokenizer_digest
from trainer.optimizer import build_optimizer, rate_at, set_rate
from trainer.run import RunFolder
from trainer.step_log import SampleLog
from trainer.task import Task, build_task
from trainer.telemetry import Telemetry
from trainer.trained import class_counts_of, class_paths_of, label_vectors_of
from trainer.world import World


def train(recipe: Recipe, world: World) -> None:
    """Train a recipe to its end, from its newest checkpoint if there is one (collective).

    Raises ValueError and OSError for what a user can mend, FloatingPointError on every rank and
    before the update when the loss or its gradient is not finite.
    """
    run = RunFolder(recipe.run)
    with run.locked() if world.is_main else nullcontext():
        _train(recipe, run, world)


def _train(recipe: Recipe, run: RunFolder, world: World) -> None:
    # ---------------------------------------------------------------- data
    data = recipe.data
    manifest = Manifest.load(data.shards, data.cache)
    training = _open_training(data, manifest)
    manifest.of_split(recipe.data.eval_split)  # said now, not after the last step
    label_vectors = label_vectors_of(recipe, manifest)
    global_batch = recipe.train.global_batch

    def steps(duration: Duration) -> int:
        return duration.in_steps(num_samples=len(training), global_batch=global_batch)

    num_steps = steps(recipe.train.duration)

    # ---------------------------------------------------------------- model
    task = build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=label_vectors,
        world=world,
        class_counts=class_counts_of(training),
        class_paths=class_paths_of(recipe, manifest),
    )
    check_modality(recipe, manifest, task.backbone)
    optimizer = build_optimizer(recipe.optimizer, task)
    torch.manual_seed(recipe.seed + world.rank)  # dropout differs between ranks
    task.train()

    # ---------------------------------------------------------------- resume
    if world.is_main:
        run.claim(recipe)
    world.barrier()
    state = TrainState(
        step=0,
        cursor=Cursor(recipe.seed),
        tree=task.head.tree_digest(),
        data=training.digest(),
        tokenizer=tokenizer_digest(recipe),
    )
    checkpoint, refused = find_checkpoint(run.checkpoints, world)
    if checkpoint is not None:
        task.create_optimizer_state(optimizer)
        state = state.resumed(checkpoint)
        load_tensors(checkpoint, task.checkpoint_entries(optimizer), world)
        restore_random_state(checkpoint, world, seed=recipe.seed)
    if state.step > num_steps:
        raise ValueError(
            f"run {run.path} is at step {state.step} and train.duration is {num_steps} steps: "
            "lengthen it, or choose another run folder"
        )
    if world.is_main:
        SampleLog.trim(run.path, state.step)
    world.barrier()

    # ---------------------------------------------------------------- steps
    telemetry = Telemetry(
        run.path,
        recipe.telemetry,
        world,
        start_step=state.step,
        num_steps=num_steps,
        global_batch=global_batch,
    )
    loader = _open_loader(training, recipe, world, state.cursor)
    evaluation_step = None
    sample_log = SampleLog(run.path, rank=world.rank, wanted=recipe.telemetry.sample_ids)
    with telemetry, loader, sample_log:
        for line in refused:
            telemetry.say(f"refused {line}")
        telemetry.say(_introduction(recipe, task, training, world, state.step, num_steps))
        if isinstance(training, Stream):
            telemetry.say(training.notice(state.cursor.samples))
        for step in range(state.step + 1, num_steps + 1):
            started = time.perf_counter()
            batch = next(loader)
            telemetry.waited(time.perf_counter() - started)
            loader.add_bad(_bad_samples(batch, world))

            rate = rate_at(
                step - 1,
                peak=recipe.optimizer.lr,
                schedule=recipe.schedule,
                num_steps=num_steps,
                num_samples=len(training),
                global_batch=global_batch,
            )
            set_rate(optimizer, rate)
            optimizer.zero_grad(set_to_none=True)
            try:
                loss = task.backward(batch, step=step)
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step}: {error}; the update was not made") from None
            norm = task.clip_gradients(recipe.train.clip_norm)
            _check_finite(step, float(loss), float(norm))
            task.step(optimizer)
            state = replace(state, step=step, cursor=loader.cursor)
            sample_log.write(step, batch)

            if telemetry.is_due(step):
                telemetry.step(
                    step,
                    loss=float(loss),
                    learning_rate=rate,
                    gradient_norm=float(norm),
                    bad_samples=len(state.cursor.bad),
                )
            # Before the checkpoint: what comes after one is not done again on resuming from it.
            if recipe.evaluation.every and step % steps(recipe.evaluation.every) == 0:
                with telemetry.pause():
                    _evaluate(run, task, step, recipe, world, label_vectors, telemetry)
                evaluation_step = step
            if step == num_steps or step % steps(recipe.checkpoint.every) == 0:
                with telemetry.pause():
                    _save(run, task, optimizer, state, recipe, world, telemetry)

        # ------------------------------------------------------------ the end
        if evaluation_step != num_steps:
            _evaluate(run, task, num_steps, recipe, world, label_vectors, telemetry)


def _open_training(data: DataConfig, manifest: Manifest) -> Split | Stream:
    if data.stream is not None:
        return open_stream(data.stream, manifest)
    return open_split(
        data.shards,
        data.train_split,
        max_bad_labels=data.max_bad_samples,
        cache=data.cache,
        manifest=manifest,
    )


def _open_loader(
    training: Split | Stream, recipe: Recipe, world: World, cursor: Cursor
) -> TrainLoader | StreamLoader:
    options: dict[str, Any] = {
        "global_batch": recipe.train.global_batch,
        "rank": world.rank,
        "world_size": world.size,
        "cursor": cursor,
        "device": world.device,
    }
    if isinstance(training, Stream):
        return StreamLoader(training, recipe.data, **options)
    return TrainLoader(training, recipe.data, **options)


@dataclass(frozen=True)
class TrainState:
    """What a run is at, besides its tensors and random states."""

    step: int
    cursor: Cursor
    tree: str
    data: str
    tokenizer: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cursor": self.cursor.to_json(),
            "tree": self.tree,
            "data": self.data,
            "tokenizer": self.tokenizer,
        }

    def resumed(self, checkpoint: Checkpoint) -> "TrainState":
        """The state in a checkpoint; ValueError where its tree, shards or tokenizer are others."""
        saved = checkpoint.state
        if saved["data"] != self.data:
            raise ValueError(
                f"checkpoint {checkpoint.folder} was trained on other shards: point data.shards at "
                "those, or start another run folder"
            )
        check_tokenizer(checkpoint, self.tokenizer)
        if saved["tree"] != self.tree:
            raise ValueError(
                f"checkpoint {checkpoint.folder} has another label tree: its shards had other "
                "classes or label vectors; point data.shards at those, or start another run folder"
            )
        cursor = Cursor.from_json(saved["cursor"])
        return replace(self, step=saved["step"], cursor=cursor)


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


def _bad_samples(batch: Batch, world: World) -> list[int]:
    """Samples that any rank replaced in this step (collective)."""
    mine = torch.tensor(
        [substitute.index for substitute in batch.substitutes],
        dtype=torch.int64,
        device=world.device,
    )
    count = torch.tensor([len(mine)], device=world.device)
    sizes = torch.cat(all_gather_equal(count, world.group)).tolist()
    return all_gather_rows(mine, sizes, world.group).tolist() if any(sizes) else []


def _check_finite(step: int, loss: float, norm: float) -> None:
    """Loss and norm are the same numbers on every rank, so all of them stop together."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}; the update was not "
            "made: lower optimizer.lr, lengthen schedule.warmup or set train.clip_norm"
        )


def _introduction(
    recipe: Recipe,
    task: Task,
    training: Split | Stream,
    world: World,
    start_step: int,
    num_steps: int,
) -> str:
    weights = sum(parameter.numel() for parameter in task.backbone.parameters())
    nodes, columns = task.head.tree.num_nodes, task.head.dim + task.head.bias
    start = f", from step {start_step}" if start_step else ""
    return (
        f"{recipe.run}: {len(training)} samples, {training.num_classes} classes; backbone "
        f"{weights} weights, head {recipe.head.weights.kind} x {recipe.head.loss.kind} "
        f"{nodes} x {columns}; {world.size} x {world.device.type}; {num_steps} steps of "
        f"{recipe.train.global_batch}{start}"
    )
