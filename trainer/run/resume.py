"""The state of a run without its tensors, and the code that resumes a run from its newest valid
checkpoint.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from data.loading.batch import Cursor
from trainer.backbone.compatibility import check_tokenizer
from trainer.checkpoints import Checkpoint, find_checkpoint, restore_random_state, stored_tensors
from trainer.checkpoints.entries import (
    create_moments,
    load_entries,
    restore_training,
    training_entries,
)
from trainer.run.folder import RunFolder
from trainer.run.provenance import Change, changes_since
from trainer.schedules import RunLength
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class TrainState:
    """The state of a run after `step` updates.

    `cursor` is the position in the data. `evaluated` is the last step with an evaluation. `skipped`
    counts the skipped updates. `loss_scale` is the state of fp16 loss scaling. `tree`, `data` and
    `tokenizer` are digests; a run can resume only if they have not changed. For a mixture, `data`
    has a digest for each of its sets. `learning_rate` is the rate of the last update; checkpoints
    of earlier versions do not contain it.
    """

    step: int
    cursor: Cursor
    tree: str
    data: str | dict[str, str]
    tokenizer: str | None
    evaluated: int = 0
    skipped: int = 0
    loss_scale: dict[str, Any] | None = None
    learning_rate: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "cursor": self.cursor.to_json()}

    def resumed(self, checkpoint: Checkpoint) -> "TrainState":
        """Return the state stored in a checkpoint. Raises ValueError if its tree, shards or
        tokenizer differ.
        """
        saved = checkpoint.state
        if saved["data"] != self.data:
            raise ValueError(
                f"checkpoint {checkpoint.folder} was trained on different shards"
                f"{_changed_sets(saved['data'], self.data)}: set data.shards to those shards or "
                "use a new run folder"
            )
        check_tokenizer(checkpoint, self.tokenizer)
        if saved["tree"] != self.tree:
            raise ValueError(
                f"checkpoint {checkpoint.folder} has a different label tree, because its shards "
                "contained different classes or label vectors: set data.shards to those shards or "
                "use a new run folder"
            )
        own = {name: saved[name] for name in vars(self) if name in saved}
        return TrainState(**{**own, "cursor": Cursor.from_json(saved["cursor"])})


def _changed_sets(before: str | dict[str, str], after: str | dict[str, str]) -> str:
    """Return the sets of a mixture that differ, in parentheses, or an empty string."""
    if isinstance(before, str) or isinstance(after, str):
        return ""
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    return f" ({', '.join(changed)})"


@dataclass(frozen=True)
class Notice:
    """A rejected checkpoint or a change since the checkpoint: a `line` to print and an event for
    the run's metrics.
    """

    event: Literal["refused", "changed"]
    line: str
    values: dict[str, str]


@dataclass(frozen=True)
class Resumed:
    """The `state` from which a run starts, and a notice for each rejected checkpoint and each
    changed setting or version.
    """

    state: TrainState
    notices: list[Notice]


def resume(
    folder: RunFolder,
    task: Task,
    start: TrainState,
    world: World,
    *,
    origin: dict[str, Any],
    length: RunLength,
) -> Resumed:
    """Load the newest valid checkpoint into the task and restore the random state (collective).

    `start` is the state of a run without checkpoints, and `origin` is this run's provenance. Raises
    ValueError if the checkpoint does not belong to this run or its step is greater than the
    `length` of the run.
    """
    checkpoint, rejected = find_checkpoint(folder.checkpoints, world)
    state, notices = start, [_rejected(line) for line in rejected]
    if checkpoint is not None:
        state = start.resumed(checkpoint)
        notices += [_changed(change) for change in changes_since(checkpoint.state, origin)]
        _load_checkpoint(checkpoint, task, state, world)
    if state.step > length.num_steps:
        raise ValueError(
            f"run {folder.path} is at step {state.step}, but train.duration is {length.num_steps} "
            "steps: increase train.duration or choose another run folder"
        )
    # Schedules depend on the duration, so a longer run may continue at a much higher rate.
    before, step, recipe = state.learning_rate, state.step, task.recipe
    if before is not None and step < length.num_steps:
        same, after = (
            recipe.optimizer.lr * recipe.schedule.rate_factor(index, length)
            for index in (step - 1, step)
        )
        if not math.isclose(same, before):
            change = Change("learning_rate", f"{before:.3g} at step {step}", f"{after:.3g}")
            notices.append(_changed(change))
    return Resumed(state, notices)


def _rejected(line: str) -> Notice:
    return Notice("refused", f"rejected {line}", {"checkpoint": line})


def _changed(change: Change) -> Notice:
    return Notice("changed", f"changed on resume: {change}", vars(change))


def _load_checkpoint(checkpoint: Checkpoint, task: Task, state: TrainState, world: World) -> None:
    # The order matters. Optimizers create their moments on the first step, so the moments must be
    # created before `training_entries` can list them as targets. DCP copies into the entries;
    # some strategies then copy them into their own layout (`restore_training`). The random state
    # comes last, because creating moments and loading may draw random numbers.
    stored = stored_tensors(checkpoint)
    _check_average(checkpoint, task, stored)
    # There are no moments before the first update or if SGD is used without momentum.
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
            f"checkpoint {checkpoint.folder} was trained without train.ema: remove train.ema or "
            "use a new run folder"
        )
