"""The training data of a run: its split or stream of tars, the batches, and the class hierarchy and
label vectors of the shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.loading.batch import Cursor
from data.loading.loader import TrainLoader
from data.loading.sampling import samples_per_epoch, training_counts
from data.loading.stream import Stream, StreamLoader
from data.shards.hierarchy import ClassPaths, class_paths
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.mixture import open_mixture
from data.shards.split import Split, open_split
from data.text.tokenizer import Tokenizer, open_tokenizer
from heads.set_measures import inverse_propensities
from trainer.config import EvalConfig, Recipe
from trainer.task import Task, build_task
from trainer.telemetry.phases import Phases
from trainer.world import World


@dataclass(frozen=True)
class RunData:
    """The training data of a run, and what its head needs to know about the classes.

    `num_samples`: the number of training samples per epoch. `class_counts` [K]: the expected number
    of samples of each class in an epoch, or None for a stream. `class_paths`: the names above each
    class in the shards' hierarchy, or None if the head does not require the hierarchy.
    """

    manifest: Manifest
    training: Split | Stream
    num_samples: int
    class_counts: np.ndarray | None
    label_vectors: np.ndarray | None
    class_paths: ClassPaths | None
    tokenizer: Tokenizer | None

    @classmethod
    def open(cls, recipe: Recipe, manifest: Manifest) -> "RunData":
        """Open the data of a recipe. `manifest` is the result of `load_manifest`.

        Raises the errors of `open_split`, and ValueError if no training sample has a label.
        """
        data = recipe.data
        training: Split | Stream
        if data.stream is not None:
            training = Stream(data.stream, manifest)
        elif data.mixture:
            training = open_mixture(data, manifest)
        else:
            manifest.of_split(data.train_split, key="data.train_split")
            training = open_split(
                data.shards, data.train_split, cache=data.cache, manifest=manifest
            )
        if isinstance(training, Stream):
            num_samples, class_counts = training.config.samples, None
        else:
            num_samples = samples_per_epoch(training, data)
            class_counts = training_counts(training, data)
            if training.label_sets and not class_counts.any():
                raise ValueError(
                    f"no sample of the training split {training.name!r} has a label: set "
                    "data.train_split or data.mixture to splits with labels"
                )
        return cls(
            manifest,
            training,
            num_samples,
            class_counts,
            label_vectors=label_vectors_of(recipe, manifest),
            class_paths=class_paths(data.shards, manifest) if recipe.head.needs_hierarchy else None,
            tokenizer=None
            if data.text is None
            else open_tokenizer(data.text.tokenizer, max_length=data.text.max_length),
        )

    def inverse_propensities(self, config: EvalConfig) -> Tensor | None:
        """Return the inverse propensities of the classes [K] in the training split, for PSP, or
        None for a stream or without label sets."""
        if not self.manifest.label_sets or isinstance(self.training, Stream):
            return None
        counts = torch.from_numpy(self.training.class_counts())
        a, b = config.propensity
        return inverse_propensities(counts, len(self.training), a=a, b=b)

    def tokenizer_digest(self) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.digest()

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


def label_vectors_of(recipe: Recipe, manifest: Manifest) -> np.ndarray | None:
    """Return the label vectors of the shards, or None if their source does not provide any."""
    if manifest.label_vectors is None:
        return None
    return load_label_vectors(recipe.data.shards, manifest, recipe.data.cache)
