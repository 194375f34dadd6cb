"""Continues a run from its newest sound checkpoint."""

from dataclasses import dataclass
from typing import Any

from trainer.checkpoints import (
    Checkpoint,
    find_checkpoint,
    load_tensors,
    restore_random_state,
    stored_names,
)
from trainer.entries import create_moments, restore_training, training_entries
from trainer.nonfinite import NonFiniteSteps
from trainer.provenance import Change, changes_since
from trainer.run import RunFolder
from trainer.state import TrainState
from trainer.step_log import SampleLog
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class Resumed:
    """Where a run starts: its `state`; one line for each checkpoint that was `refused`; and what
    has `changed` since the one that it continues from."""

    state: TrainState
    refused: list[str]
    changed: list[Change]


def resume(
    folder: RunFolder,
    task: Task,
    start: TrainState,
    world: World,
    *,
    origin: dict[str, Any],
    num_steps: int,
) -> Resumed:
    """Load the newest sound checkpoint into the task and restore the random state (collective).

    `start` is the state of a run without checkpoints, `origin` this run's provenance. Raises
    ValueError where the checkpoint does not belong to this run, or lies beyond its end.
    """
    checkpoint, refused = find_checkpoint(folder.checkpoints, world)
    state, changed = start, []
    if checkpoint is not None:
        state, changed = start.resumed(checkpoint), changes_since(checkpoint.state, origin)
        _load(checkpoint, task, state, world)
    if state.step > num_steps:
        raise ValueError(
            f"run {folder.path} is at step {state.step} and train.duration is {num_steps} steps: "
            "lengthen it, or choose another run folder"
        )
    if world.is_main:
        SampleLog.trim(folder.path, state.step)
        NonFiniteSteps.trim(folder.path, state.step)
    world.barrier()
    return Resumed(state, refused, changed)


def _load(checkpoint: Checkpoint, task: Task, state: TrainState, world: World) -> None:
    stored = stored_names(checkpoint)
    _check_average(checkpoint, task, stored)
    # Before the first update there are none, nor under SGD without momentum.
    if any(name.startswith("optimizer.") for name in stored):
        create_moments(task)
    entries = training_entries(task)
    load_tensors(checkpoint, entries, world)
    restore_training(task, entries)
    if state.loss_scale is not None:
        task.loss_scale.restore(state.loss_scale)
    restore_random_state(checkpoint, world, seed=task.recipe.seed)


def _check_average(checkpoint: Checkpoint, task: Task, stored: set[str]) -> None:
    if task.average is not None and not any(name.startswith("ema.") for name in stored):
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained without train.ema: leave it out, or start "
            "another run folder"
        )
