"""Batches of pictures: the endless training stream with its cursor, and one pass for evaluation.

Which sample comes when is `data/order.py`. The global batches are the same for every world size and
number of workers; ranks and workers only take shares of the reading.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.augment import for_training, sample_rng
from data.config import DataConfig
from data.images import decode, for_evaluation
from data.order import locate, share
from data.split import Split
from data.substitute import Substitute, check_limit, read_sound

_log = logging.getLogger("kway.data")


@dataclass(frozen=True)
class Cursor:
    """The whole state of the training stream: which order, and global samples consumed.

    bad: the bad samples met so far (sorted positions in the split), at most `data.max_bad_samples`.
    A rank knows those of its own shares; `join` unites them.
    """

    seed: int
    samples: int = 0
    bad: tuple[int, ...] = ()

    def join(self, bad: Iterable[int]) -> "Cursor":
        """This cursor with more bad samples, such as those that other ranks met."""
        return replace(self, bad=tuple(sorted({*self.bad, *bad})))

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed, "samples": self.samples, "bad": list(self.bad)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Cursor":
        """Raises ValueError for anything that `to_json` does not give; `bad` may be missing."""
        bad = value.get("bad", [])
        numbers = [value.get("seed"), value.get("samples"), *(bad if type(bad) is list else [None])]
        if value.keys() - {"bad"} != {"seed", "samples"} or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise ValueError(f"a data cursor is {{seed, samples, bad}}, all >= 0, not {value}")
        return cls(value["seed"], value["samples"]).join(bad)


@dataclass(frozen=True)
class Batch:
    """This rank's share of a batch of b samples; b may be 0.

    inputs: `pixel_values` uint8 [b, C, H, W]; labels: int64 [b]; indices: position in the split,
    int64 [b]; cursor: the stream's state after this batch (None in evaluation); substitutes: the
    rows whose sample is bad: `indices` keeps it, inputs and labels are those of the one that stands
    in.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    indices: Tensor
    cursor: Cursor | None
    substitutes: tuple[Substitute, ...] = ()


_Arrays = tuple[Tensor, Tensor, Tensor, list[Substitute]]


class _Reader(Dataset):
    """(first, last) position -> pixels, labels, indices; runs in the loader's processes.

    An error is returned, not raised: torch would wrap it into a message of many lines.
    """

    def __init__(self, split: Split, config: DataConfig, *, seed: int | None) -> None:
        if split.manifest.modality != "image":
            raise ValueError(
                f"{split.folder} holds {split.manifest.modality} and the loader reads pictures: "
                "choose shards of pictures"
            )
        self.split = split
        self.config = config
        self.seed = seed

    def __getitem__(self, span: tuple[int, int]) -> _Arrays | ValueError | OSError:
        try:
            return self._read(np.arange(*span, dtype=np.int64))
        except (ValueError, OSError) as error:
            return error

    def _read(self, positions: np.ndarray) -> _Arrays:
        if self.seed is None:
            epochs, indices = np.zeros_like(positions), positions
        else:
            epochs, indices = locate(self.seed, positions, len(self.split))
        image = self.config.image
        pixels = np.empty((len(indices), image.channels, image.size, image.size), np.uint8)
        labels = np.empty(len(indices), np.int64)
        substitutes = []
        for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            if self.seed is None:
                picture, labels[row] = self._picture(index)
                pixels[row] = for_evaluation(picture, image)
                continue
            (picture, labels[row]), substitute = read_sound(
                self._picture, self.seed, epoch, index, len(self.split)
            )
            if substitute is not None:
                substitutes.append(substitute)
            rng = sample_rng(self.seed, epoch, index)
            pixels[row] = for_training(picture, image, self.config.augment, rng)
        pixels_, labels_, indices_ = map(torch.from_numpy, (pixels, labels, indices))
        return pixels_, labels_, indices_, substitutes

    def _picture(self, index: int) -> tuple[np.ndarray, int]:
        data, _, label = self.split.read(index)
        try:
            return decode(data, self.config.image.channels), label
        except ValueError as error:
            raise self.split.bad(index, str(error)) from error


def _arrays(reader: _Reader, spans: Iterable[tuple[int, int]], workers: int) -> Iterator[_Arrays]:
    loader = DataLoader(
        reader,
        sampler=spans,
        batch_size=None,
        num_workers=workers,
        # Its own generator: the loader draws a seed, which must not move the trainer's global one.
        generator=torch.Generator(),
    )
    for arrays in loader:
        if isinstance(arrays, Exception):
            raise arrays
        yield arrays


class TrainLoader:
    """The training stream from `cursor` on, for ever; iterating again goes on where it stopped.

    Global batch: samples [cursor.samples, cursor.samples + global_batch) of the endless order, of
    which this rank reads `share(step)`. A bad sample is replaced (`data/substitute.py`), and so
    are its later occurrences. Raises ValueError for a split without samples or a rank outside the
    world; while iterating, with the list where the bad samples that this rank and the cursor know
    of are more than `config.max_bad_samples`.
    """

    def __init__(
        self,
        split: Split,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor,
    ) -> None:
        _check_rank(rank, world_size)
        if global_batch < 1:
            raise ValueError(f"global_batch is {global_batch}: it must be at least 1")
        self.cursor = cursor
        self._global_batch = global_batch
        self._rank = rank
        self._world_size = world_size
        self._workers = config.workers
        self._reader = _Reader(split, config, seed=cursor.seed)
        self._batches: Iterator[_Arrays] | None = None
        self._limit = config.max_bad_samples
        self._split = split
        self._bad: dict[int, str] = {}
        self._note(cursor.bad, "bad before this run was resumed")

    def share(self, step: int) -> range:
        """Positions of the stream that this rank reads, `step` batches after the cursor."""
        start = self.cursor.samples + step * self._global_batch
        part = share(self._global_batch, self._rank, self._world_size)
        return range(start + part.start, start + part.stop)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            spans = ((p.start, p.stop) for p in self._shares())
            self._batches = _arrays(self._reader, spans, self._workers)
        pixels, labels, indices, substitutes = next(self._batches)
        self._replaced(substitutes)
        after = replace(self.cursor, samples=self.cursor.samples + self._global_batch)
        self.cursor = after.join(self._bad)
        return Batch({"pixel_values": pixels}, labels, indices, self.cursor, tuple(substitutes))

    def add_bad(self, bad: Iterable[int]) -> None:
        """Take over bad samples that other ranks met, into the limit and into the cursor.

        Raises ValueError as iterating does.
        """
        self._note(bad, "bad on another rank")
        self.cursor = self.cursor.join(self._bad)
        check_limit(self._bad, self._limit)

    def _note(self, bad: Iterable[int], reason: str) -> None:
        for index in bad:
            if index not in self._bad:
                self._bad[index] = str(self._split.bad(index, reason))

    def _replaced(self, substitutes: Iterable[Substitute]) -> None:
        """Log what is bad for the first time; ValueError with the list where it is too much."""
        for substitute in substitutes:
            if substitute.index not in self._bad:
                self._bad[substitute.index] = substitute.reason
                _log.warning("sample %d stands in: %s", substitute.by, substitute.reason)
        check_limit(self._bad, self._limit)

    def _shares(self) -> Iterator[range]:
        """Shares from the present cursor on; workers run ahead of it, so it is read once."""
        first = self.share(0)
        for step in itertools.count():
            yield range(
                first.start + step * self._global_batch, first.stop + step * self._global_batch
            )

    def close(self) -> None:
        """Stop the loader's processes; the next batch would start them again."""
        self._batches = None

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EvalLoader:
    """One pass over a split: each rank reads a contiguous share, every sample exactly once.

    Shares differ by one or are empty, and yet every rank gets the same number of batches (the last
    may be empty), so that collectives inside an evaluation step meet.
    """

    def __init__(
        self, split: Split, config: DataConfig, *, batch: int, rank: int = 0, world_size: int = 1
    ) -> None:
        _check_rank(rank, world_size)
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        self._share = share(len(split), rank, world_size)
        self._batch = batch
        self._workers = config.workers
        self._num_batches = -(-len(split) // (world_size * batch))
        self._reader = _Reader(split, config, seed=None)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        starts = (self._share.start + n * self._batch for n in range(len(self)))
        stop = self._share.stop
        spans = [(min(s, stop), min(s + self._batch, stop)) for s in starts]
        for pixels, labels, indices, _ in _arrays(self._reader, spans, self._workers):
            yield Batch({"pixel_values": pixels}, labels, indices, None)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
