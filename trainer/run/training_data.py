"""The training data of a run: its split or stream of tars, the batches, and the class hierarchy and
label vectors of the shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np

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
from trainer.task import Task, build_task
from trainer.telemetry.phases import Phases
from trainer.world import World


@dataclass(frozen=True)
class RunData:
    """The training data of a run, and what its head needs to know about the classes.

    `num_samples`: the number of training samples per epoch. `class_counts` [K]: the expected number
    of samples of each class in an epoch, or None for a stream. See `label_vectors_of` and
    `class_paths_of` for the others.
    """

    manifest: Manifest
    training: Split | Mixture | Stream
    num_samples: int
    class_counts: np.ndarray | None
    label_vectors: np.ndarray | None
    class_paths: list[tuple[str, ...]] | None

    @classmethod
    def open(cls, recipe: Recipe, manifest: Manifest) -> "RunData":
        """Open the data of a recipe. `manifest` is the result of `load_manifest`."""
        data = recipe.data
        training: Split | Mixture | Stream
        if data.stream is not None:
            training = open_stream(data.stream, manifest)
        elif data.mixture:
            training = open_mixture(data, manifest)
        else:
            manifest.of_split(data.train_split, key="data.train_split")
            training = open_split(
                data.shards,
                data.train_split,
                max_bad_labels=data.max_bad_samples,
                cache=data.cache,
                manifest=manifest,
            )
        if isinstance(training, Stream):
            num_samples, class_counts = len(training), None
        else:
            num_samples = samples_per_epoch(training, data)
            class_counts = training_counts(training, data)
        return cls(
            manifest,
            training,
            num_samples,
            class_counts,
            label_vectors=label_vectors_of(recipe, manifest),
            class_paths=class_paths_of(recipe, manifest),
        )

    def build_task(self, recipe: Recipe, world: World, phases: Phases | None = None) -> Task:
        """Build the recipe's task for these classes; see `build_task`."""
        return build_task(
            recipe,
            class_names=self.manifest.class_names,
            label_vectors=self.label_vectors,
            world=world,
            class_counts=self.class_counts,
            class_paths=self.class_paths,
            phases=phases,
        )

    def open_loader(
        self, recipe: Recipe, world: World, cursor: Cursor
    ) -> TrainLoader | StreamLoader:
        """Return a loader for this rank's share of each global batch, starting at `cursor`."""
        options: dict[str, Any] = {
            "global_batch": recipe.train.global_batch,
            "rank": world.rank,
            "world_size": world.size,
            "cursor": cursor,
            "device": world.device,
        }
        if isinstance(self.training, Stream):
            return StreamLoader(self.training, recipe.data, **options)
        return TrainLoader(self.training, recipe.data, **options)


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
        for address, last, used in zip(data.addresses, newest, manifests, strict=True):
            if used is not last:
                print(
                    f"{address}: this run uses generation {used.generation} of {last.generation}; "
                    "a new run uses the newest one",
                    flush=True,
                )
        if manifests[0].label_vectors is not None and united.label_vectors is None:
            num_added = len(united.classes) - len(manifests[0].classes)
            print(
                f"data.mixture adds {num_added:,} classes without label vectors to {data.shards}: "
                "label vectors are not used",
                flush=True,
            )
    return with_generations(recipe, chosen), united


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
