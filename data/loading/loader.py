"""The batches of a split: an endless training stream with a cursor, and a pass for evaluation.

`data/loading/order.py` defines the order of the samples. Global batches are the same for every
world size and number of workers, because ranks and workers only divide the reading among themselves
(`data/loading/reader.py`). A run can therefore resume on a different number of ranks.
"""

import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.augment.training import ProgressiveSizes
from data.config import DataConfig
from data.loading.batch import Batch, Cursor, Substitute
from data.loading.inputs import open_inputs
from data.loading.order import ByLength, Locate, share
from data.loading.reader import EvaluationReader, Share, TrainingReader, check_limit
from data.loading.sampling import sampled_order, samples_per_epoch
from data.loading.workers import (
    LOST_WORKER,
    PREFETCHED,
    SMALL_SHM,
    begin_worker,
    lost_worker,
)
from data.retry import TransientError
from data.shards.split import Split

_log = logging.getLogger("kway.data")

_CPU = torch.device("cpu")


class EndlessLoader(ABC):
    """Yields batches on `device`, starting at `cursor`.

    A new iteration continues where the previous one stopped. Raises ValueError for a rank outside
    the world or an empty global batch. Iteration raises ValueError, with the list of bad samples,
    if more than `config.max_bad_samples` were found by this rank or are listed in the cursor.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor,
        device: torch.device = _CPU,
    ) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: it must be at least 1")
        self.cursor = cursor
        self._config = config
        self._global_batch = global_batch
        self._part = share(global_batch, rank, world_size)
        self._device = device
        self._batches: Iterator[Batch] | None = None
        self._bad = {
            index: self._unseen(index, "before this run was resumed") for index in cursor.bad
        }

    @abstractmethod
    def _read(self) -> Iterator[Batch]:
        """Yield batches from the current cursor.

        The cursor is read only once, at the start, because workers read ahead of it.
        """

    @abstractmethod
    def _unseen(self, index: int, where: str) -> str:
        """Return a message for a bad sample that was found by another rank or before a resume."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = prefetch_to_device(self._read(), self._device)
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # the next call restarts at this batch
            raise
        self._record(batch.substitutes)
        # Advance the cursor when the trainer receives a batch, not when a worker reads it ahead of
        # time. Otherwise, a run that resumes from a checkpoint would skip batches that were read
        # but not used for training.
        after = replace(self.cursor, samples=self.cursor.samples + self._global_batch)
        self.cursor = after.join(self._bad)
        return replace(batch, cursor=self.cursor)

    def add_bad(self, bad: Iterable[int]) -> None:
        """Add bad samples that other ranks found to the cursor and count them toward the limit.

        Raises the same ValueError as iteration.
        """
        for index in bad:
            if index not in self._bad:
                self._bad[index] = self._unseen(index, "on another rank, see its log")
        self.cursor = self.cursor.join(self._bad)
        check_limit(self._bad, self._config.max_bad_samples)

    def _record(self, substitutes: Iterable[Substitute]) -> None:
        """Log each bad sample when it is first found."""
        for substitute in substitutes:
            if self._bad.get(substitute.index) != substitute.reason:
                self._bad[substitute.index] = substitute.reason
                _log.warning("%s", substitute)
        check_limit(self._bad, self._config.max_bad_samples)

    def close(self) -> None:
        """Stop the worker processes. Reading the next batch restarts them."""
        self._batches = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TrainLoader(EndlessLoader):
    """The endless training stream of a split or mixture, starting at `cursor`.

    A global batch contains the samples [cursor.samples, cursor.samples + global_batch) of the
    endless order: every epoch is a permutation of the split, unless `config.is_sampled`
    (`data/loading/sampling.py`). This rank reads its share of them. A bad sample is replaced each
    time it occurs (`data/loading/reader.py`). Raises the errors of `EndlessLoader`, and
    ValueError for an empty split or a recipe whose modality does not match the shards.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        *,
        global_batch: int,
        cursor: Cursor,
        **options: Any,
    ) -> None:
        """options: the other arguments of `EndlessLoader`."""
        self._split = split
        super().__init__(config, global_batch=global_batch, cursor=cursor, **options)
        inputs = open_inputs(config, split.manifest)
        seed = cursor.seed
        num_batches = config.text.batches_by_length if config.text is not None else 1
        at_once = 2 if num_batches > 1 else 1
        order = split.order(seed, config.shuffle_shards, groups_at_once=at_once)
        locate: Locate = order.locate
        epoch, longest = order.num_samples, order.samples_at_least
        if config.is_sampled:
            sampled = sampled_order(split, config, seed)
            locate = sampled.locate
            epoch = longest = sampled.num_samples
        # Limit a window to the length of one group, so that it reads from at most two groups.
        num_batches = max(1, min(num_batches, longest // global_batch))
        if num_batches > 1:
            locate = ByLength(
                locate,
                split.sizes,
                seed=seed,
                epoch=epoch,
                batch=global_batch,
                num_batches=num_batches,
            ).locate
        self._sides = ProgressiveSizes(
            config.image,
            config.augment,
            num_samples=samples_per_epoch(split, config),
            global_batch=global_batch,
        )
        self._reader = TrainingReader(split, inputs, config, seed=seed, order=order, locate=locate)

    def _share(self, start: int) -> Share:
        """Return this rank's share of the global batch that begins at `start`."""
        positions = range(start + self._part.start, start + self._part.stop)
        return Share(positions, self._sides.at(start))

    def _read(self) -> Iterator[Batch]:
        starts = itertools.count(self.cursor.samples, self._global_batch)
        requests = map(self._share, starts)
        return read_ahead(self._reader, requests, self._config.workers, self._device)

    def _unseen(self, index: int, where: str) -> str:
        return str(self._split.bad(index, f"bad {where}"))


class EvalLoader:
    """One pass over a split.

    Each rank reads a contiguous share, and every sample is read exactly once. Texts in a local
    folder are sorted by length to reduce padding. The sizes of the shares differ by at most one
    sample, and shares may be empty. Every rank gets the same number of batches, so that collectives
    in an evaluation step match across ranks; a rank's last batch may be empty. Raises the errors of
    `TrainLoader`.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        part = share(len(split), rank, world_size)
        inputs = open_inputs(config, split.manifest)
        self._indices = np.arange(part.start, part.stop, dtype=np.int64)
        # Shards at a URL are fetched one after another. Sorting by length would mix samples from
        # all shards, so the cache would have to store every shard at once.
        if inputs.by_length and not split.files.is_remote:
            self._indices = self._indices[np.argsort(split.sizes(self._indices), kind="stable")]
        self._batch = batch
        self._workers = config.workers
        self._device = device
        self._num_batches = -(-len(split) // (world_size * batch))
        self._reader = EvaluationReader(split, inputs, side=config.image.size)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        starts = (number * self._batch for number in range(len(self)))
        requests = [self._indices[start : start + self._batch] for start in starts]
        batches = read_ahead(self._reader, requests, self._workers, self._device)
        return prefetch_to_device(batches, self._device)


def read_ahead(
    reader: Dataset, requests: Iterable[Any] | None, workers: int, device: torch.device
) -> Iterator[Batch]:
    """Yield the batches of `reader` in order. `workers` processes read batches ahead.

    requests: one request per batch, or None for an iterable reader. Raises the errors that the
    reader returns, TransientError if a process was killed, and ValueError if /dev/shm is too small.
    """
    pinned = device.type == "cuda"
    loader = DataLoader(
        reader,
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        pin_memory=pinned,
        # Use a separate generator. The loader draws a seed, and this must not advance the trainer's
        # global generator.
        generator=torch.Generator(),
        worker_init_fn=partial(begin_worker, parent=os.getpid()) if workers else None,
    )
    for batch in _received(loader):
        if isinstance(batch, Exception):
            raise batch
        # Pinning has already copied the batch out of the worker's memory.
        yield batch if pinned or not workers else _own(batch)


def _received(loader: DataLoader) -> Iterator[Batch | Exception]:
    """Yield the results that the workers send. Raises the errors of `read_ahead`."""
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        raise TransientError(LOST_WORKER) from error
    except RuntimeError as error:
        if (reason := lost_worker(error)) is None:
            raise
        # A larger limit is needed, so a restart would fail again.
        kind = ValueError if reason == SMALL_SHM else TransientError
        raise kind(reason) from error


def _own(batch: Batch) -> Batch:
    """Copy the pixels to memory that no worker writes to."""
    if (pixels := batch.inputs.get("pixel_values")) is None:
        return batch
    return replace(batch, inputs={**batch.inputs, "pixel_values": pixels.clone()})


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` on `device`.

    On CUDA, the next batch is read and copied on a separate stream before the current one is
    yielded, so that the copy overlaps with the training step. On other devices, batches are yielded
    unchanged.
    """
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    ahead = _copy_next(batches, device, copies)
    while ahead is not None:
        computing = torch.cuda.current_stream(device)
        # The copy may still be running. Kernels on the compute stream must not read the batch
        # before the copy is complete.
        computing.wait_stream(copies)
        for tensor in ahead.tensors():
            # The allocator must not reuse this memory for the next copy while kernels are still
            # reading it.
            tensor.record_stream(computing)
        ready, ahead = ahead, _copy_next(batches, device, copies)
        yield ready


def _copy_next(
    batches: Iterator[Batch], device: torch.device, copies: torch.cuda.Stream
) -> Batch | None:
    batch = next(batches, None)
    if batch is None:
        return None
    with torch.cuda.stream(copies):
        return batch.to(device)
