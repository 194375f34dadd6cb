"""The state of a run without its tensors, its provenance, and the code that resumes a run from its
newest valid checkpoint.

The provenance consists of the resolved recipe and the versions of the libraries and imported
components that compute a step, including the decoder of random crops. A run that resumes reports
and records the differences.
"""

import json
import math
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from data.images.jpeg_crop import decoder
from data.loading.batch import Cursor
from trainer.backbone.compatibility import check_checkpoint
from trainer.checkpoints import Checkpoint, restore_random_state, stored_shapes
from trainer.checkpoints.entries import (
    create_moments,
    load_entries,
    restore_training,
    training_entries,
)
from trainer.config import Recipe
from trainer.imports import import_paths, source_version
from trainer.recipe import drop_removed_settings
from trainer.run.folder import RunFolder, flat_settings
from trainer.schedules import RunLength
from trainer.task import Task
from trainer.telemetry.jsonl import Event
from trainer.world import World

# Settings that must not change within a run: with a new value, training would not be a continuation
# of the earlier steps. Settings under _FREE may change.
_FIXED = ("seed", "data", "backbone", "head", "optimizer.kind", "train.global_batch")
_FREE = (
    "data.workers",
    "data.cache",
    "data.eval_split",
    "head.memory_mib",
    "head.min_init_share",
)
_LIBRARIES = (
    "kway",
    "deepspeed",
    "numpy",
    "opencv-python-headless",
    "pillow",
    "safetensors",
    "tokenizers",
    "transformers",
)


@dataclass(frozen=True)
class TrainState:
    """The state of a run after `step` updates.

    `cursor` is the position in the data. `evaluated` is the last step with an evaluation. `skipped`
    counts the skipped updates. `loss_scale` is the state of fp16 loss scaling. `tree`, `data` and
    `tokenizer` are digests; a run can resume only if they have not changed. For a mixture, `data`
    has a digest for each of its sets. `learning_rate` is the rate of the last update; checkpoints
    of earlier versions do not contain it. `origin` is the `provenance`.
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
    origin: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "origin"}
        return {**own, "cursor": self.cursor.to_json(), **self.origin}

    def resumed(self, checkpoint: Checkpoint) -> "TrainState":
        """Return the state stored in a checkpoint, with this run's provenance. Raises ValueError if
        its tree, shards or tokenizer differ.
        """
        saved = checkpoint.state
        if saved["data"] != self.data:
            before, after, sets = saved["data"], self.data, ""
            if isinstance(before, dict) and isinstance(after, dict):  # mixtures
                changed = [name for name in before | after if before.get(name) != after.get(name)]
                sets = f" ({', '.join(changed)})"
            raise ValueError(
                f"checkpoint {checkpoint.folder} was trained on different shards{sets}: set "
                "data.shards to those shards or use a new run folder"
            )
        check_checkpoint(checkpoint, tree=self.tree, tokenizer=self.tokenizer)
        own = {name: saved[name] for name in vars(self) if name in saved}
        cursor = Cursor.from_json(saved["cursor"])
        return TrainState(**{**own, "cursor": cursor, "origin": self.origin})


def resume(
    folder: RunFolder,
    task: Task,
    start: TrainState,
    world: World,
    *,
    found: tuple[Checkpoint | None, list[str]],
    length: RunLength,
) -> tuple[TrainState, list[Event]]:
    """Load a checkpoint into the task and restore the random state (collective). Return the state
    from which the run starts, and an event for each rejected checkpoint and each changed setting or
    version.

    `found` is the result of `find_checkpoint`, and `start` is the state of a run without
    checkpoints. Raises ValueError if the checkpoint does not belong to this run, or if its step is
    greater than the `length` of the run.
    """
    (checkpoint, rejected), state, changes = found, start, list[Change]()
    if checkpoint is not None:
        changes = changes_since(checkpoint.state, start.origin)
        if fixed := [change.key for change in changes if change.is_fixed]:
            raise ValueError(
                f"run {folder.path} was started with different values of {', '.join(fixed)}: undo "
                "the change or choose another run folder"
            )
        state = start.resumed(checkpoint)
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
            changes.append(Change("learning_rate", f"{before:.3g} at step {step}", f"{after:.3g}"))
    events = [Event("refused", step, f"rejected {line}", {"checkpoint": line}) for line in rejected]
    for each in changes:
        values = {"key": each.key, "old": each.old, "new": each.new}
        events.append(Event("changed", step, f"changed on resume: {each}", values))
    return state, events


def _load_checkpoint(checkpoint: Checkpoint, task: Task, state: TrainState, world: World) -> None:
    # The order matters. Optimizers create their moments on the first step, so the moments must be
    # created before `training_entries` can list them as targets. DCP copies into the entries;
    # some strategies then copy them into their own layout (`restore_training`). The random state
    # comes last, because creating moments and loading may draw random numbers.
    stored = stored_shapes(checkpoint)
    if task.average is not None and not any(name.startswith("ema.") for name in stored):
        raise ValueError(
            f"checkpoint {checkpoint.folder} was trained without train.ema: remove train.ema or "
            "use a new run folder"
        )
    # There are no moments before the first update or if SGD is used without momentum.
    if any(name.startswith("optimizer.") for name in stored):
        create_moments(task)
    entries = training_entries(task)
    load_entries(checkpoint, entries, world)
    restore_training(task, entries)
    if state.loss_scale is not None:
        task.loss_scale.restore(state.loss_scale)
    restore_random_state(checkpoint, world, seed=task.recipe.seed)


# ---------------------------------------------------------------- provenance


@dataclass(frozen=True)
class Change:
    """A setting or a version that differs from the one in the checkpoint. If `is_fixed`, it must
    not change within a run."""

    key: str
    old: str
    new: str
    is_fixed: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def provenance(recipe: Recipe, *, evaluated_on: str | None = None) -> dict[str, Any]:
    """Return the keys `recipe` and `versions` of a checkpoint's JSON state.

    `evaluated_on` identifies the evaluations whose results `checkpoint.keep_best` compares.
    """
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # a source tree, or another package provides it
            continue
    settings = recipe.model_dump(mode="json")
    versions |= {path: source_version(path) for path in import_paths(settings).values()}
    if recipe.data.text is None:
        versions["jpeg_decoder"] = decoder()
    elif recipe.data.text.batches_by_length > 1:
        # Before, they crossed epochs. A run that resumes from such a checkpoint reads some texts of
        # its current epoch twice and others not at all.
        versions["windows_of_texts"] = "end with the epoch"
    if recipe.checkpoint.keep_best is not None and evaluated_on is not None:
        versions["evaluation"] = evaluated_on
    return {"recipe": settings, "versions": versions}


def changes_since(stored: dict[str, Any], current: dict[str, Any]) -> list[Change]:
    """Return the differences between the `current` provenance and the provenance `stored` in a
    checkpoint.

    The list is empty for checkpoints of earlier versions, which do not store the provenance.
    """
    if "recipe" not in stored:
        return []
    drop_removed_settings(stored["recipe"])
    # By dotted key: `optimizer.lr`, …, `version.torch`, …
    old, new = (
        flat_settings(each["recipe"]) | flat_settings({"version": each["versions"]})
        for each in (stored, current)
    )
    changes = []
    for key in sorted(old.keys() | new.keys()):
        if key in old and key in new and old[key] == new[key]:
            continue
        # A setting that only one of the versions of kway knows has not changed. But if the other
        # recipe has `data.augment.mix: null`, `data.augment.mix.kind` has.
        only_in_one, leaves = key not in old or key not in new, {*old, *new}
        is_known = not only_in_one or any(key.startswith(f"{leaf}.") for leaf in leaves)
        under_fixed, under_free = (
            any(f"{key}.".startswith(f"{prefix}.") for prefix in prefixes)
            for prefixes in (_FIXED, _FREE)
        )
        before, after = (
            value if isinstance(value, str) else json.dumps(value)
            for value in (values.get(key, "not set") for values in (old, new))
        )
        changes.append(Change(key, before, after, is_known and under_fixed and not under_free))
    return changes
