"""Trains a tiny task for a few steps with any strategy, for several test modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from data.images.decode import decode, for_evaluation
from data.loading.batch import Batch
from data.shards.manifest import Manifest
from data.shards.split import open_split
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.checkpoints import find_checkpoint
from trainer.checkpoints.entries import (
    create_moments,
    load_entries,
    restore_training,
    training_entries,
)
from trainer.config import Recipe
from trainer.run.training_data import label_vectors_of
from trainer.step import (
    Numbers,
    compute_gradients,
    divide_gradients,
    gradient_norm,
    read_numbers,
    set_rates,
    take_step,
    update_weights,
)
from trainer.task import Task, build_task
from trainer.train import train
from trainer.world import World


def make_task(
    shards: Path, class_ranks: int | None = None, *, world: World | None = None, **changes: Any
) -> Task:
    """Return the task that `tests.shards.glyph_recipe` with `changes` describes, on this rank."""
    recipe = glyph_recipe(shards, Path("unused"), **changes)
    manifest = Manifest.load(shards)
    return build_task(
        recipe,
        class_names=manifest.class_names,
        label_vectors=label_vectors_of(recipe, manifest),
        world=world or rank_world(class_ranks),
        class_counts=np.arange(1, len(manifest.classes) + 1),
    )


def started(
    shards: Path, class_ranks: int | None = None, *, world: World | None = None, **changes: Any
) -> Task:
    """Return the same task in training mode, with its strategy and optimizers."""
    task = make_task(shards, class_ranks, world=world, **changes)
    task.start_training()
    return task.train()


def resume(task: Task, root: Path) -> None:
    """Load the newest checkpoint, which must be valid."""
    checkpoint, rejected = find_checkpoint(root, task.world)
    assert checkpoint is not None
    assert not rejected
    create_moments(task)
    entries = training_entries(task)
    load_entries(checkpoint, entries, task.world)
    restore_training(task, entries)


def held_out(shards: Path, recipe: Recipe) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return all images of the test split as one batch, and their labels."""
    with open_split(shards, "test") as split:
        images = [
            for_evaluation(decode(split.read(i)[0], 1), recipe.data.image)
            for i in range(len(split))
        ]
        return {"pixel_values": torch.from_numpy(np.stack(images))}, split.labels.copy()


def train_on_ranks(recipes: list[Recipe]) -> None:
    """Train each recipe, on all ranks of `run_on_ranks` or in this process."""
    for recipe in recipes:
        train(recipe, rank_world())


def images(begin: int, end: int, num_classes: int = 13) -> Batch:
    """Return rows `begin` to `end` of 12 noise images."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (12, 1, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.randint(num_classes, (12,), generator=generator)
    return Batch({"pixel_values": pixels[begin:end]}, labels[begin:end], torch.arange(begin, end))


def share(task: Task, rows: int = 12) -> Batch:
    """Return this rank's share of the first `rows` noise images."""
    world = task.world
    return images(rows * world.rank // world.size, rows * (world.rank + 1) // world.size)


def take_steps(task: Task, num_steps: int, *, rows: int = 12, first: int = 1) -> list[float]:
    """Train on the same batch in every step, and return the losses."""
    losses = []
    set_rates(task, 1.0)
    for step in range(first, first + num_steps):
        losses.append(float(compute_gradients(task, share(task, rows), step=step).loss))
        clip_gradients(task, 1.0)
        update_weights(task, step=step)
    return losses


def take(task: Task, step: int, rate: float = 1.0) -> Numbers:
    """Take a step on `share` and read its numbers."""
    return read_numbers(task, take_step(task, share(task), rate, step=step))


def clip_gradients(task: Task, max_norm: float | None) -> float:
    """Divide all gradients by the loss scale, clip them, and return their norm (collective)."""
    norm = float(gradient_norm(task))
    divide_gradients(task, float(task.loss_scale.value), norm, max_norm)
    return norm


Trained = tuple[list[float], dict[str, np.ndarray]]


def trained(shards: Path, class_ranks: int | None, changes: dict[str, Any]) -> Trained:
    """Return the losses of three steps with the gradient norm of the next one, and all entries
    after the three steps.
    """
    task = started(shards, class_ranks, **changes)
    rows = changes.get("train__global_batch", 12)
    losses = take_steps(task, 3, rows=rows)
    entries = full_entries(task)
    compute_gradients(task, share(task, rows), step=4)
    norm = clip_gradients(task, None)
    task.strategy.close()
    return [*losses, norm], entries


def each(function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Call `function` with the arguments of each case on the same ranks, because starting ranks is
    slow."""
    return [function(*case) for case in cases]


def assert_equal_results(found: Trained, expected: Trained, name: str) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, err_msg=name)
    assert found[1].keys() == expected[1].keys(), name
    for entry, value in expected[1].items():
        np.testing.assert_allclose(
            found[1][entry], value, rtol=2e-3, atol=2e-5, err_msg=f"{name} {entry}"
        )


def full_entries(task: Task) -> dict[str, np.ndarray]:
    """Return the full tensors of all checkpoint entries. This is a collective call."""
    return {name: full_array(tensor) for name, tensor in training_entries(task).items()}


def full_array(tensor: torch.Tensor) -> np.ndarray:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu().numpy().copy()
