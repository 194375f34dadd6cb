"""Resumes a run from its newest sound checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.checkpoints import (
    Checkpoint,
    find_checkpoint,
    restore_random_state,
    stored_shapes,
)
from trainer.checkpoints.entries import (
    create_moments,
    load_entries,
    restore_training,
    training_entries,
)
from trainer.run.folder import RunFolder
from trainer.run.provenance import Change, changes_since
from trainer.run.state import TrainState
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class Notice:
    """Something that resuming found: a `line` for a person and an event for the run's metrics."""

    event: Literal["refused", "changed"]
    line: str
    values: dict[str, str]


@dataclass(frozen=True)
class Resumed:
    """The `state` that a run starts from, and a notice for each rejected checkpoint and each
    changed setting or version."""

    state: TrainState
    notices: list[Notice]


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
    ValueError if the checkpoint does not belong to this run, or is beyond its end.
    """
    checkpoint, refused = find_checkpoint(folder.checkpoints, world)
    state, notices = start, [_refused(line) for line in refused]
    if checkpoint is not None:
        state = start.resumed(checkpoint)
        notices += [_changed(change) for change in changes_since(checkpoint.state, origin)]
        _load(checkpoint, task, state, world)
    if state.step > num_steps:
        raise ValueError(
            f"run {folder.path} is at step {state.step} and train.duration is {num_steps} steps: "
            "lengthen it, or choose another run folder"
        )
    return Resumed(state, notices)


def _refused(line: str) -> Notice:
    return Notice("refused", f"refused {line}", {"checkpoint": line})


def _changed(change: Change) -> Notice:
    return Notice("changed", f"changed on resume: {change}", vars(change))


def _load(checkpoint: Checkpoint, task: Task, state: TrainState, world: World) -> None:
    stored = stored_shapes(checkpoint)
    _check_average(checkpoint, task, stored)
    # There are none before the first update or under SGD without momentum.
    if any(name.startswith("optimizer.") for name in stored):
        create_moments(task)
    entries = training_entries(task)
    load_entries(checkpoint, entries, world)
    restore_training(task, entries)
    if state.loss_scale is not None:
        task.loss_scale.restore(state.loss_scale)
    restore_random_state(checkpoint, world, seed=task.recipe.seed)


def _check_average(checkpoint: Checkpoint, task: Task, stored: Iterable[str]) -> None:
    if task.average is not None and not any(name.startswith("ema.") for name in stored):
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained without train.ema: leave it out, or start "
            "another run folder"
        )
