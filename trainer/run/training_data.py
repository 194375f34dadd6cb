"""The training data of a run: its split or stream of tars, the batches, and the class hierarchy and
label vectors of the shards."""

from typing import Any

import numpy as np

from data.config import DataConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.loading.sampling import samples_per_epoch, training_counts
from data.loading.stream import Stream, StreamLoader
from data.shards.hierarchy import class_paths
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.mixture import Mixture, open_mixture, read_manifests, united_manifest
from data.shards.split import Split, open_split
from trainer.config import Recipe
from trainer.world import World

Training = Split | Mixture | Stream


def load_run_manifest(data: DataConfig, *, is_main: bool) -> Manifest:
    """Return the manifest of the shards, which includes the classes of the mixture.

    is_main: whether to print that label vectors of the shards are not used.
    """
    own, *others = read_manifests(data)
    for address, manifest in zip(data.addresses, (own, *others), strict=True):
        manifest.check_shards(address)
    united = united_manifest(data, own, others)
    if is_main and own.label_vectors is not None and united.label_vectors is None:
        num_added = len(united.classes) - len(own.classes)
        print(
            f"data.mixture adds {num_added:,} classes without label vectors to {data.shards}: "
            "label vectors are not used",
            flush=True,
        )
    return united


def open_training(data: DataConfig, manifest: Manifest) -> Training:
    """Open the training data of a recipe. manifest: the result of `load_manifest`."""
    if data.stream is not None:
        return Stream(data.stream, manifest)
    if data.mixture:
        return open_mixture(data, manifest)
    manifest.of_split(data.train_split, key="data.train_split")
    return open_split(
        data.shards,
        data.train_split,
        max_bad_labels=data.max_bad_samples,
        cache=data.cache,
        manifest=manifest,
    )


def epoch_length(training: Training, data: DataConfig) -> int:
    """Return the number of training samples per epoch."""
    if isinstance(training, Stream):
        return training.config.samples
    return samples_per_epoch(training, data)


def class_counts_of(training: Training, data: DataConfig) -> np.ndarray | None:
    """Return the expected number of samples of each class in an epoch of training, [K], or None
    for a stream.
    """
    return None if isinstance(training, Stream) else training_counts(training, data)


def open_loader(
    training: Training, recipe: Recipe, world: World, cursor: Cursor
) -> TrainLoader | StreamLoader:
    """Return a loader for this rank's share of each global batch, starting at `cursor`."""
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


def class_paths_of(recipe: Recipe, manifest: Manifest) -> list[tuple[str, ...]] | None:
    """Return the names above each class in the shards' hierarchy, or None if the recipe does not
    require the hierarchy.
    """
    return class_paths(recipe.data.shards, manifest) if recipe.head.needs_hierarchy else None


def label_vectors_of(recipe: Recipe, manifest: Manifest) -> np.ndarray | None:
    """Return the label vectors of the shards, or None if their source does not provide any."""
    if manifest.label_vectors is None:
        return None
    return load_label_vectors(recipe.data.shards, manifest, recipe.data.cache)
