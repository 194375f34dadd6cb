"""The batches that all ranks of a run load."""

from collections.abc import Iterator
from contextlib import ExitStack

from data.config import DataConfig
from data.loading.batch import Batch, Cursor
from data.loading.loader import TrainLoader
from data.shards.mixture import load_manifest, open_mixture
from data.shards.split import Split, open_split


def opened(config: DataConfig) -> Split:
    if config.mixture:
        return open_mixture(config, load_manifest(config))
    return open_split(config.shards, config.train_split, max_bad_labels=config.max_bad_samples)


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
