"""Training on webdataset tars without an index: the stream and its batches.

This replaces a split and its `TrainLoader` (`data/loading/loader.py`) when no index is available.
It provides fewer guarantees; `Stream.notice` lists those that are missing.
`data/loading/stream_reader.py` reads the samples.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from data.augment.training import ProgressiveSizes
from data.config import DataConfig, StreamConfig
from data.loading.batch import Batch, Cursor
from data.loading.endless import EndlessLoader
from data.loading.inputs import open_inputs
from data.loading.order import share
from data.loading.stream_reader import REMEDY, RankShare, StreamReader
from data.loading.workers import read_ahead
from data.remote.config import is_url
from data.shards.manifest import Manifest
from data.tars.indexing import IMAGE_EXTENSIONS, INDEXED, TEXT_EXTENSIONS
from data.tars.labels import ClassList
from data.tars.stream import TarReader

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Stream:
    """The tars listed in a recipe's `data.stream`. `manifest` provides the class list."""

    config: StreamConfig
    manifest: Manifest

    def __len__(self) -> int:
        """Return the number of samples per epoch. The recipe sets it, because the samples in the
        tars are not counted.
        """
        return self.config.samples

    @property
    def num_classes(self) -> int:
        return len(self.manifest.classes)

    def class_counts(self) -> None:
        """Return None, because the samples are not counted."""

    def digest(self) -> str:
        """Return 16 hexadecimal digits of a hash of the tar list and the class list."""
        content = "\n".join([*self.config.addresses, "", *self.manifest.class_names])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def notice(self, samples: int = 0) -> str:
        """Return one line that lists the guarantees that a stream does not provide.

        samples: the number of samples consumed before the run was resumed.
        """
        resumed = (
            f"resuming after {samples:,} samples in a new order, so some samples repeat before "
            "others are read for the first time; "
            if samples
            else ""
        )
        return (
            f"{resumed}reading {len(self.config.addresses):,} tars as a stream without an index: "
            "batches depend on the number of ranks and workers, a resumed run uses a new order, "
            "checksums are not verified, data.stream.samples defines an epoch, and samples per "
            "class are not counted (to index the tars, run kway shard index)"
        )

    def tars(self, attempts: int) -> TarReader:
        """Return a reader for the tars.

        Labels have the same meaning as in the shards that the manifest describes.
        """
        source = self.manifest.source
        positions = source.kind != INDEXED or bool(source.parameters.get("positions"))
        chosen = self.config.sample
        images = self.manifest.modality == "image"
        return TarReader(
            endings=(chosen.lower().lstrip("."),)
            if chosen
            else IMAGE_EXTENSIONS
            if images
            else TEXT_EXTENSIONS,
            label_field=self.config.label_field,
            classes=ClassList(self.manifest.class_names, positions=positions),
            attempts=attempts,
        )


def open_stream(config: StreamConfig, manifest: Manifest) -> Stream:
    """Open the stream of a recipe.

    Raises FileNotFoundError if a tar at a local path is missing.
    """
    for address in config.addresses:
        if not is_url(address) and not Path(address).is_file():
            raise FileNotFoundError(f"{address} does not exist: check data.stream.shards")
    return Stream(config, manifest)


class StreamLoader(EndlessLoader):
    """The counterpart of `TrainLoader` for a stream: endless batches with a cursor.

    Every rank gets as many batches as it requests. Damaged samples are skipped. `indices` are
    hashes of the shard and the key. Raises the errors of `EndlessLoader`, and ValueError if there
    are fewer tars than readers (ranks x workers). Iterating again after `close` begins a new order.
    """

    remedy = REMEDY

    def __init__(
        self,
        stream: Stream,
        config: DataConfig,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        cursor: Cursor,
        device: torch.device = _CPU,
    ) -> None:
        super().__init__(
            config,
            global_batch=global_batch,
            rank=rank,
            world_size=world_size,
            cursor=cursor,
            device=device,
        )
        self._stream = stream
        # If there are more ranks than rows, some ranks read nothing and are not assigned any tars.
        ranks = [one for one in range(world_size) if share(global_batch, one, world_size)]
        self._rank = ranks.index(rank) if rank in ranks else 0
        self._num_ranks = len(ranks)
        self._inputs = open_inputs(config, stream.manifest)
        self._sides = ProgressiveSizes(
            config.image, config.augment, num_samples=len(stream), global_batch=global_batch
        )
        self._check_readers(len(stream.config.addresses), max(1, config.workers))

    def _check_readers(self, num_tars: int, workers: int) -> None:
        if num_tars < self._num_ranks * workers:
            raise ValueError(
                f"data.stream.shards lists {num_tars} tar(s), but {self._num_ranks} rank(s) x "
                f"{workers} worker(s) require at least one each: lower data.workers, use fewer "
                "ranks or more tars, or run kway shard index"
            )

    def _read(self, *, pinned: bool) -> Iterator[Batch]:
        start, stream = self.cursor.samples, self._stream
        reader = StreamReader(
            stream.config.addresses,
            stream.tars(self._config.cache.attempts),
            self._inputs,
            self._config,
            buffer=stream.config.buffer,
            sides=self._sides,
            rank_share=RankShare(
                seed=self.cursor.seed,
                start=start,
                rank=self._rank,
                num_ranks=self._num_ranks,
                offset=self._part.start,
                rows=len(self._part),
                global_batch=self._global_batch,
            ),
        )
        return read_ahead(reader, None, workers=self._config.workers, pinned=pinned)

    def _unseen(self, index: int, where: str) -> str:
        return f"sample number {index} was skipped {where}"
