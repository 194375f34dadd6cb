"""Reads samples of a split into batches without a cursor, in the loader's worker processes.

`data/loading/loader.py` determines which samples are requested, and in which order. Training
replaces a bad sample. The choice depends only on (seed, epoch, index) and the set of bad samples,
so it is the same for every world size, and the positions of all later samples in the global order
do not change.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from data.augment.base import pair_rng, philox
from data.augment.mix import Mix
from data.config import DataConfig
from data.images.decode import contiguous
from data.loading.batch import Batch, Mixed, Substitute, label_tensors
from data.loading.inputs import ImageInputs, Items, TextInputs
from data.loading.order import Locate, Order
from data.shards.split import BadSampleError, Split

Inputs = ImageInputs | TextInputs

_STREAM = 0x73756273  # "subs": separates these random draws from those of augmentation
_ATTEMPTS = 1000
_NAMED = 20


class Share(NamedTuple):
    """A rank's share of a global batch: the stream positions and the image size in pixels."""

    positions: range
    side: int


class Reader(Dataset):
    """Maps a request for a batch to the batch.

    Errors are returned, not raised, because torch would wrap them in a multi-line message.
    """

    def __init__(self, split: Split, inputs: Inputs) -> None:
        self.split = split
        self.inputs = inputs

    def __getitem__(self, request: Any) -> Batch | ValueError | OSError:
        try:
            return self.read(request)
        except (ValueError, OSError) as error:
            return error

    @abstractmethod
    def read(self, request: Any) -> Batch:
        """Return the batch. Raises ValueError or OSError if the samples cannot be read."""

    def items(
        self,
        samples: np.ndarray,
        batch: Items,
        candidates: Callable[[int], Iterable[int]] = lambda row: (),
    ) -> tuple[Any, Iterator[Any], dict[int, Substitute]]:
        """Return the labels of `samples` as `Split.read_many` does, their items, and the
        substitutes by row.

        candidates: maps the row of a bad sample to those that may replace it. If none can, the
        BadSampleError of the bad sample is raised. The labels and substitutes are complete when the
        items have been consumed.
        """
        decode, finish = batch
        labels, contents = self.split.read_many(samples)
        substitutes: dict[int, Substitute] = {}

        def read(row: int, sample: int) -> Any:
            data, _, labels[row] = self.split.read(sample)
            try:
                return decode(row, data)
            except ValueError as error:
                raise self.split.bad(sample, str(error)) from error

        def read_again(row: int) -> Any:
            sample = int(samples[row])
            try:
                return read(row, sample)
            except BadSampleError as error:
                bad = error
            for candidate in candidates(row):
                with suppress(BadSampleError):
                    decoded = read(row, candidate)
                    substitutes[row] = Substitute(sample, candidate, str(bad))
                    return decoded
            raise bad

        def items() -> Iterator[Any]:
            for row, data in enumerate(contents):
                try:
                    if data is None:
                        raise ValueError("bad sample")  # caught below
                    decoded = decode(row, data)
                except ValueError:
                    decoded = read_again(row)
                yield finish(decoded)

        return labels, items(), substitutes


class EvaluationReader(Reader):
    """Maps sample indices, int64 [b], to their batch. A bad sample raises an error.

    Request the samples of shards at URLs in stored order, so that the shards can be prefetched.
    """

    def __init__(self, split: Split, inputs: Inputs, *, side: int) -> None:
        super().__init__(split, inputs)
        self._side = side

    def read(self, request: np.ndarray) -> Batch:
        if len(request):
            self.split.files.will_read(None, int(request[0]))
        labels, items, _ = self.items(request, self.inputs.evaluation_batch())
        inputs = self.inputs.collate(items, len(request), side=self._side)
        class_ids, offsets = label_tensors(labels)
        return Batch(inputs, class_ids, torch.from_numpy(request), offsets=offsets)


class TrainingReader(Reader):
    """Maps a share of the stream to the batch of its samples.

    `locate` maps positions to samples, and `order` determines which shards are prefetched.
    Augmentation is keyed by (seed, pass, sample), so it differs each time a sample occurs. Mixing
    is keyed by the pair of positions 2n and 2n + 1. A bad sample is replaced.
    """

    def __init__(
        self,
        split: Split,
        inputs: Inputs,
        config: DataConfig,
        *,
        seed: int,
        order: Order,
        locate: Locate,
    ) -> None:
        super().__init__(split, inputs)
        self._config = config
        self._seed = seed
        self._order = order
        self._locate = locate

    def read(self, request: Share) -> Batch:
        self.split.files.will_read(self._order, request.positions.start)
        positions = np.arange(request.positions.start, request.positions.stop, dtype=np.int64)
        side = request.side
        mix = self._config.augment.mix
        if mix is not None and self.split.manifest.modality == "image":
            return self._mixed(positions, side, mix)
        passes, indices = self._locate(positions)
        labels, items, substitutes = self._items(passes, indices, side)
        inputs = self.inputs.collate(items, len(indices), side=side)
        class_ids, offsets = label_tensors(labels)
        return Batch(
            inputs,
            class_ids,
            torch.from_numpy(indices),
            substitutes=tuple(substitutes.values()),
            offsets=offsets,
        )

    def _items(
        self, passes: np.ndarray, indices: np.ndarray, side: int
    ) -> tuple[Any, Iterator[Any], dict[int, Substitute]]:
        batch = self.inputs.training_batch(self._seed, passes, indices, side=side)

        def substitutes_of(row: int) -> Iterator[int]:
            key = self._seed, int(passes[row]), int(indices[row])
            return candidates(*key, len(self.split))

        return self.items(indices, batch, substitutes_of)

    def _mixed(self, positions: np.ndarray, side: int, mix: Mix) -> Batch:
        """Mix each row with its partner.

        Partners are at the adjacent positions 2n and 2n + 1 of the stream. Each sample is decoded
        once and used for both rows of its pair. If the partner belongs to another rank's share and
        is bad, that rank reports it.
        """
        wanted = np.union1d(positions, positions ^ 1)
        passes, indices = self._locate(wanted)
        labels, items, substitutes = self._items(passes, indices, side)
        images = [contiguous(item) for item in items]
        own, other = (np.searchsorted(wanted, position) for position in (positions, positions ^ 1))
        draws = [mix.draw(side, pair_rng(self._seed, at)) for at in positions.tolist()]
        pairs = zip(own.tolist(), other.tolist(), draws, strict=True)
        mixed: Iterator[Any] = (draw(images[a], images[b]) for a, b, draw in pairs)
        weights = torch.tensor([draw.weight for draw in draws], dtype=torch.float32)
        pixels = self.inputs.collate(mixed, len(positions), side=side)

        def labels_at(rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
            is_set = isinstance(labels, list)
            return label_tensors([labels[row] for row in rows.tolist()] if is_set else labels[rows])

        class_ids, offsets = labels_at(own)
        second, of_second = labels_at(other)
        return Batch(
            pixels,
            class_ids,
            torch.from_numpy(indices[own]),
            mixed=Mixed(second, weights, of_second),
            substitutes=tuple(substitutes[row] for row in own.tolist() if row in substitutes),
            offsets=offsets,
        )


def candidates(seed: int, epoch: int, index: int, num_samples: int) -> Iterator[int]:
    """Yield candidate substitutes for `index`."""
    rng = np.random.Generator(philox(seed, _STREAM, index, epoch))
    for _ in range(_ATTEMPTS):
        if (candidate := int(rng.integers(num_samples))) != index:
            yield candidate


def check_limit(bad: Mapping[int, str], limit: int) -> None:
    """Raise ValueError, with the list of bad samples, if there are more than `limit`.

    bad: a map from indices to reasons that contain the shard and key.
    """
    if len(bad) <= limit:
        return
    named = "; ".join(list(bad.values())[:_NAMED])
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    raise ValueError(
        f"{len(bad)} bad sample{'s' if len(bad) > 1 else ''} in training, but "
        f"data.max_bad_samples is {limit}: {named}{more}: fix the shards (kway shard "
        "verify --decode lists all damage of shards with an index), or raise the limit"
    )
