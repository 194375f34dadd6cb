"""The batches that all ranks of a run load, and the labels of their rows."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import numpy as np
import torch

from data.config import DataConfig
from data.loading.batch import Batch, Cursor, Mixed
from data.loading.loader import TrainLoader
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import Split, open_split


def opened(config: DataConfig) -> Split:
    if config.mixture:
        return open_mixture(config, load_manifest(config))
    return open_split(config.shards, config.train_split)


def row_labels(batch: Batch) -> list[list[int]]:
    """Return the labels of each row."""
    return [batch.rows(row, row + 1).labels.tolist() for row in range(batch.num_rows)]


def sample_labels(split: Split, samples: Iterable[int]) -> list[list[int]]:
    """Return the labels of each sample."""
    return [np.atleast_1d(split.read(int(sample))[2]).tolist() for sample in samples]


def set_sizes(batch: Batch | Mixed) -> torch.Tensor:
    """Return the number of labels of each row, or nothing if each has one label."""
    return torch.empty(0) if batch.offsets is None else batch.offsets.diff()


def rank_batches(
    config: DataConfig, cursor: Cursor, *, batch: int, steps: int, world_size: int = 1
) -> Iterator[list[Batch]]:
    """Yield the batches of each step, one per rank. `batch` is the size of a global batch."""
    with ExitStack() as stack:
        split = stack.enter_context(opened(config))
        shape = {"global_batch": batch, "world_size": world_size, "cursor": cursor}
        loaders = [TrainLoader(split, config, rank=rank, **shape) for rank in range(world_size)]
        for loader in loaders:
            stack.enter_context(loader)
        for _ in range(steps):
            yield [next(loader) for loader in loaders]
