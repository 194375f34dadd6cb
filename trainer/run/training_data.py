"""The training data of a run: its split or stream of tars, the batches, and the class hierarchy and
label vectors of the shards."""

from typing import Any

import numpy as np

from data.config import DataConfig
from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.loading.sampling import samples_per_epoch, training_counts
from data.loading.stream import Stream, StreamLoader, open_stream
from data.shards.hierarchy import class_paths
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.mixture import Mixture, open_mixture, read_manifests, united_manifest
from data.shards.split import Split, open_split
from trainer.checkpoints.exchange import exchange
from trainer.config import Recipe
from trainer.run.folder import RunFolder, with_generations
from trainer.world import World

Training = Split | Mixture | Stream


def load_run_manifest(recipe: Recipe, folder: RunFolder, world: World) -> tuple[Recipe, Manifest]:
    """Return the recipe with the generations of its shards, and their manifest, which includes the
    classes of the mixture (collective).

    A run that has checkpoints keeps its generations. Otherwise, the run starts with the newest
    generations that all ranks find, because samples may be appended while the ranks start.
    """
    data = recipe.data
    newest = read_manifests(data)
    numbers = [manifest.generation for manifest in newest]
    found = exchange([folder.generations(data.addresses), numbers], world.group)
    of_ranks = zip(*(of_rank for _, of_rank in found), strict=True)
    chosen = [
        given or kept or min(common)
        for given, kept, common in zip(data.generations, found[0][0], of_ranks, strict=True)
    ]
    manifests = [
        manifest.of_generation(number, origin=address)
        for manifest, number, address in zip(newest, chosen, data.addresses, strict=True)
    ]
    for manifest, address in zip(manifests, data.addresses, strict=True):
        manifest.check_shards(address)
    united = united_manifest(data, manifests[0], manifests[1:])
    if world.is_main:
        _print_notices(data, newest, manifests, united)
    return with_generations(recipe, chosen), united


def _print_notices(
    data: DataConfig, newest: list[Manifest], manifests: list[Manifest], united: Manifest
) -> None:
    """Print which samples and label vectors of the shards the run does not use."""
    for address, last, used in zip(data.addresses, newest, manifests, strict=True):
        if used is not last:
            print(
                f"{address}: this run uses generation {used.generation} of {last.generation}; a "
                "new run uses the newest one",
                flush=True,
            )
    if manifests[0].label_vectors is not None and united.label_vectors is None:
        num_added = len(united.classes) - len(manifests[0].classes)
        print(
            f"data.mixture adds {num_added:,} classes without label vectors to {data.shards}: "
            "label vectors are not used",
            flush=True,
        )


def open_training(data: DataConfig, manifest: Manifest) -> Training:
    """Open the training data of a recipe. manifest: the result of `load_manifest`."""
    if data.stream is not None:
        return open_stream(data.stream, manifest)
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
    return len(training) if isinstance(training, Stream) else samples_per_epoch(training, data)


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
