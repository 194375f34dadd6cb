"""Opens a finished (or interrupted) run: its recipe, its shards and its newest model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data import Manifest, Split, load_label_vectors, open_split
from trainer.checkpoint import find_checkpoint, load_tensors
from trainer.config import Recipe
from trainer.run import RunFolder
from trainer.task import Task, build_task
from trainer.world import World


@dataclass(frozen=True)
class TrainedRun:
    """A run's model at `step`, in evaluation mode, and what it was trained on."""

    folder: RunFolder
    recipe: Recipe
    manifest: Manifest
    label_vectors: np.ndarray | None
    task: Task
    step: int


def open_trained(path: Path, world: World) -> TrainedRun:
    """Load the newest sound checkpoint of the run in `path`, at any world size (collective).

    Raises FileNotFoundError where there is no run or no checkpoint, ValueError where every
    checkpoint is damaged or the shards have changed since.
    """
    folder = RunFolder(path)
    recipe = folder.load_recipe()
    manifest = Manifest.load(recipe.data.shards)
    label_vectors = label_vectors_of(recipe, manifest)
    checkpoint, refused = find_checkpoint(folder.checkpoints, world)
    if checkpoint is None:
        reason = f": {refused[0]}" if refused else ": train it first"
        raise FileNotFoundError(f"run {path} has no checkpoint to load{reason}")
    with open_split(recipe.data.shards, recipe.data.train_split) as split:
        class_counts = class_counts_of(split)
    task = build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=label_vectors,
        world=world,
        class_counts=class_counts,
    )
    if checkpoint.state["tree"] != task.head.tree_digest():
        raise ValueError(
            f"checkpoint {checkpoint.folder} has another label tree than {recipe.data.shards} "
            "gives now: bring back the shards it was trained on"
        )
    load_tensors(checkpoint, task.checkpoint_entries(None), world)
    return TrainedRun(folder, recipe, manifest, label_vectors, task.eval(), checkpoint.step)


def class_counts_of(split: Split) -> np.ndarray:
    """Samples of each class in a split [K]."""
    return split.class_counts()


def label_vectors_of(recipe: Recipe, manifest: Manifest) -> np.ndarray | None:
    """The shards' label vectors, None where their source gives none."""
    if manifest.label_vectors is None:
        return None
    return load_label_vectors(recipe.data.shards, manifest)
