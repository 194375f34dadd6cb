"""Opens a finished or interrupted run: its recipe, its shards and its newest model."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from data.loading.stream import Stream
from data.shards.mixture import load_manifest
from trainer.backbone.compatibility import check_checkpoint
from trainer.checkpoints import find_checkpoint, open_checkpoint
from trainer.checkpoints.entries import averaged_entries, load_entries, model_entries
from trainer.checkpoints.folders import step_folder
from trainer.config import Recipe
from trainer.run.folder import RunFolder
from trainer.run.training_data import RunData
from trainer.task import Task
from trainer.world import World


@dataclass(frozen=True)
class TrainedRun:
    """A run's model at `step`, in evaluation mode, with its recipe and data."""

    folder: RunFolder
    recipe: Recipe
    data: RunData
    task: Task
    step: int


def open_trained(
    path: Path,
    world: World,
    *,
    step: int | None = None,
    allow_imports: Collection[str] = (),
) -> TrainedRun:
    """Load the newest valid checkpoint of the run in `path`, or the checkpoint of `step`, at any
    world size (collective). For a run with `train.ema`, the averaged weights are loaded. Only
    import paths in `allow_imports` are imported.

    Raises FileNotFoundError if there is no run or no valid checkpoint, and ValueError if the
    checkpoint of `step` is damaged or the shards have changed since it was saved.
    """
    folder = RunFolder(path)
    recipe = folder.load_recipe(allow_imports=allow_imports)
    if step is None:
        checkpoint, rejected = find_checkpoint(folder.checkpoints, world)
        if checkpoint is None:
            reason = f": {rejected[0]}" if rejected else ": train it first"
            raise FileNotFoundError(f"run {folder.path} has no checkpoint to load{reason}")
    else:
        checkpoint = open_checkpoint(step_folder(folder.checkpoints, step), world)
    data = RunData.open(recipe, load_manifest(recipe.data))
    if not isinstance(data.training, Stream):
        data.training.close()
    task = data.build_task(recipe, world)
    tree, tokenizer = task.head.tree_digest(), data.tokenizer_digest()
    check_checkpoint(checkpoint, tree=tree, tokenizer=tokenizer)
    entries = model_entries(task) if recipe.train.ema is None else averaged_entries(task)
    load_entries(checkpoint, entries, world)
    return TrainedRun(folder, recipe, data, task.eval(), checkpoint.step)
