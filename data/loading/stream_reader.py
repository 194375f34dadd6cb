"""Reads the batches of a stream, in the loader's worker processes.

Each reader (one worker of one rank) is assigned its own shards in every pass over the tars,
shuffles their samples in a bounded buffer of undecoded bytes, and decodes the samples of a batch.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data.augment.base import pair_rng
from data.augment.mix import Mix
from data.augment.training import ProgressiveSizes
from data.config import DataConfig
from data.images.decode import contiguous
from data.loading.batch import Batch, Mixed
from data.loading.inputs import Inputs
from data.loading.order import permuted_index
from data.loading.substitute import Substitute, check_limit
from data.tars.stream import StreamSample, TarReader

REMEDY = "fix"
_NAMED = 3
# A reader may be assigned the same small bad tar several times in a row by chance, but not this
# many times.
_MAX_REPEATS = 100


class _Buffered(NamedTuple):
    epoch: int
    sample: StreamSample


@dataclass(frozen=True)
class RankShare:
    """A rank's share of each global batch: `rows` rows, starting at row `offset`.

    rank: the position of the rank among the `num_ranks` ranks that read samples. seed and start
    (the number of samples consumed so far) determine the order.
    """

    seed: int
    start: int
    rank: int
    num_ranks: int
    offset: int
    rows: int
    global_batch: int


class StreamReader(IterableDataset):
    """Yields the batches of a rank indefinitely. The rank's workers take turns.

    A batch lists the samples that were skipped since the previous batch. Errors are returned, not
    raised, because torch would wrap them in a multi-line message.
    """

    def __init__(
        self,
        shards: Sequence[str],
        tars: TarReader,
        inputs: Inputs,
        config: DataConfig,
        *,
        buffer: int,
        sides: ProgressiveSizes,
        rank_share: RankShare,
    ) -> None:
        self._shards = shards
        self._tars = tars
        self._inputs = inputs
        self._config = config
        self._buffer = buffer
        self._sides = sides
        self._rank_share = rank_share
        self._bad: dict[int, str] = {}
        self._new: list[Substitute] = []
        # The number of failed attempts to decode each sample since the last successful one.
        self._undecoded = Counter[int]()

    def __iter__(self) -> Iterator[Batch | ValueError | OSError]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank_share = self._rank_share
        reader = rank_share.rank * count + number
        rng = random.Random(f"{rank_share.seed} {rank_share.start} {reader}")
        samples = shuffled(self._samples(reader, rank_share.num_ranks * count), self._buffer, rng)
        try:
            for step in itertools.count(number, count):
                yield self._batch(samples, rank_share.start + step * rank_share.global_batch)
        except (ValueError, OSError) as error:
            yield error

    def _samples(self, reader: int, readers: int) -> Iterator[_Buffered]:
        """Yield the samples of reader number `reader` of `readers`, pass after pass.

        Raises ValueError if none of the tars contains a sample.
        """
        seed, start, num_shards = self._rank_share.seed, self._rank_share.start, len(self._shards)
        # Reader r reads every `readers`-th position of the epoch's permutation of shards, starting
        # at r.
        positions = np.arange(reader, num_shards, readers)
        empty: set[int] = set()
        for epoch in itertools.count():
            for shard in permuted_index(seed, epoch, positions, num_shards, part=start).tolist():
                empty.add(shard)
                for found in self._tars.samples(self._shards[shard]):
                    if isinstance(found, Substitute):
                        self._skip(found)
                    else:
                        empty.clear()
                        yield _Buffered(epoch, found)
                if len(empty) == num_shards:
                    raise ValueError(self._no_samples())

    def _items(self, samples: Iterator[_Buffered], side: int) -> Iterator[tuple[Any, StreamSample]]:
        """Yield the augmented samples that can be decoded. Raises ValueError if all of them are
        damaged.
        """
        for epoch, sample in samples:
            # After a resume, the random values differ from those of the interrupted pass.
            key = np.array([epoch + self._rank_share.start]), np.array([sample.number])
            items = self._inputs.training_batch(self._rank_share.seed, *key, side=side)
            try:
                decoded = items.decode(0, sample.data)
            except ValueError as error:
                self._undecoded[sample.number] += 1
                if self._undecoded[sample.number] == _MAX_REPEATS:
                    raise ValueError(self._no_samples()) from error
                self._skip(Substitute(sample.number, None, f"{sample.name}: {error}"))
                continue
            self._undecoded.clear()
            yield items.augment(0, decoded), sample

    def _skip(self, skipped: Substitute) -> None:
        """Record a new bad sample. Raises ValueError, with the list of bad samples, if there are
        too many.
        """
        if skipped.index in self._bad:
            return
        self._bad[skipped.index] = skipped.reason
        self._new.append(skipped)
        check_limit(self._bad, self._config.max_bad_samples, remedy=REMEDY)

    def _no_samples(self) -> str:
        named = "; ".join(list(self._bad.values())[:_NAMED])
        return (
            f"{len(self._shards)} tar(s) contain no usable samples: {named}: check "
            "data.stream.sample, "
            "data.stream.label_field and the class list of data.shards"
        )

    def _batch(self, samples: Iterator[_Buffered], start: int) -> Batch:
        """Collate this rank's share of the global batch that begins at `start`."""
        side = self._sides.at(start)
        items, labels, numbers = [], [], []
        for item, sample in itertools.islice(self._items(samples, side), self._rank_share.rows):
            items.append(item)
            labels.append(sample.label)
            numbers.append(sample.number)
        known, pairs = torch.tensor(labels, dtype=torch.int64), None
        mix = self._config.augment.mix
        if mix is not None and self._config.text is None:
            items, pairs = self._mixed(items, known, start + self._rank_share.offset, side, mix)
        skipped, self._new = tuple(self._new), []
        return Batch(
            self._inputs.collate(items, len(items), side=side),
            known,
            torch.tensor(numbers, dtype=torch.int64),
            mixed=pairs,
            substitutes=skipped,
        )

    def _mixed(
        self, items: Sequence[Any], labels: Tensor, position: int, side: int, mix: Mix
    ) -> tuple[list[Any], Mixed]:
        """Mix rows 2n and 2n + 1 of this rank's batch.

        If the last row does not have a partner, it is mixed with itself.
        """
        rows = np.arange(len(items))
        partners = np.minimum(rows ^ 1, len(items) - 1)
        draws = [
            # Reserve two positions per pair, so that no two pairs share a key, whether the first
            # row is even or odd.
            mix.draw(side, pair_rng(self._rank_share.seed, 2 * (position + row // 2)))
            for row in rows.tolist()
        ]
        items = [contiguous(item) for item in items]
        blended = [
            draw(items[row], items[partner])
            for row, partner, draw in zip(rows.tolist(), partners.tolist(), draws, strict=True)
        ]
        weights = torch.tensor([draw.weight for draw in draws], dtype=torch.float32)
        return blended, Mixed(labels[torch.from_numpy(partners)], weights)


def shuffled(samples: Iterator[_Buffered], size: int, rng: random.Random) -> Iterator[_Buffered]:
    """Yield `samples` in random order from a buffer of at most `size`.

    All samples of a pass are yielded before the next pass begins. Samples of the next pass that are
    read early remain in the buffer.
    """
    waiting: list[_Buffered] = []
    later: list[_Buffered] = []
    epoch = 0
    for sample in samples:
        # Keep samples of at most two passes in the buffer, even if passes are shorter than the
        # buffer.
        while sample.epoch > epoch and (not waiting or sample.epoch > epoch + 1):
            while waiting:
                yield _drawn(waiting, rng)
            waiting, later, epoch = later, [], epoch + 1
        (waiting if sample.epoch == epoch else later).append(sample)
        if len(waiting) + len(later) >= size:
            yield _drawn(waiting, rng)


def _drawn(waiting: list[_Buffered], rng: random.Random) -> _Buffered:
    index = rng.randrange(len(waiting))
    waiting[index], waiting[-1] = waiting[-1], waiting[index]
    return waiting.pop()
