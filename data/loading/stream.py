"""Training on webdataset tars without an index, which webdataset itself reads sequentially.

`Stream.notice` states what kway cannot guarantee for them.
"""

import hashlib
import itertools
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import torch
import webdataset
from torch.utils.data import IterableDataset, get_worker_info
from webdataset.tariterators import group_by_keys

from data.augment.training import ProgressiveSizes
from data.config import DataConfig, StreamConfig
from data.loading.batch import Batch, Cursor, Substitute, label_tensors
from data.loading.inputs import open_inputs
from data.loading.loader import EndlessLoader, read_ahead
from data.loading.reader import check_limit
from data.shards.manifest import Manifest
from data.tars.labels import LABEL_EXTENSIONS, Labels, label_texts
from data.tars.samples import IMAGE_EXTENSIONS, TEXT_EXTENSIONS

_MAX_OPENED = 1000
_MAX_BYTES = 1 << 28  # of a file in a tar, which may be compressed


@dataclass(frozen=True)
class Stream:
    """The tars listed in a recipe's `data.stream`. `manifest` provides the class list."""

    config: StreamConfig
    manifest: Manifest

    def __len__(self) -> int:
        """Return the number of samples per epoch, which the recipe sets."""
        return self.config.samples

    @property
    def num_classes(self) -> int:
        return len(self.manifest.classes)

    def digest(self) -> str:
        """Return 16 hexadecimal digits of a hash of the tar list and the class list."""
        content = "\n".join([*self.config.addresses, "", *self.manifest.class_names])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def notice(self) -> str:
        """Return one line that lists the guarantees that a stream does not provide."""
        return (
            f"reading {len(self.config.addresses):,} tars as a stream without an index: webdataset "
            "draws tars with replacement, so samples repeat before all have been read, batches "
            "depend on the number of ranks and workers, a resumed run draws a new random sequence, "
            "checksums are not verified, a damaged tar can end early without an error, and samples "
            "per class are not counted (to index the tars, run kway shard index)"
        )


class StreamLoader(EndlessLoader):
    """The counterpart of `TrainLoader` for a stream: endless batches with a cursor.

    Damaged samples are skipped. `indices` are hashes of the tar and the key.
    """

    def __init__(self, stream: Stream, config: DataConfig, **options: Any) -> None:
        super().__init__(config, **options)
        if config.augment.mix is not None:
            raise ValueError("data.augment.mix requires shards with an index: set it to null")
        self._stream = stream

    def _read(self) -> Iterator[Batch]:
        shape = self._part, self._global_batch
        reader = _Reader(self._stream, self._config, self.cursor, *shape)
        return read_ahead(reader, None, self._config.workers, self._device)

    def _unseen(self, index: int, where: str) -> str:
        return f"sample number {index} was skipped {where}"


class _Reader(IterableDataset):
    """Yields the rows `part` of each global batch of `step` rows.

    Errors are returned, not raised, because torch would wrap them in a multi-line message.
    """

    def __init__(
        self, stream: Stream, config: DataConfig, cursor: Cursor, part: range, step: int
    ) -> None:
        self._stream, self._cursor, self._part, self._step = stream.config, cursor, part, step
        self._tars = stream.config.addresses
        self._max_bad = config.max_bad_samples
        self._inputs = open_inputs(config, stream.manifest)
        self._sides = ProgressiveSizes(
            config.image, config.augment, num_samples=stream.config.samples, global_batch=step
        )
        chosen, is_image = stream.config.sample, stream.manifest.modality == "image"
        known = IMAGE_EXTENSIONS if is_image else TEXT_EXTENSIONS
        self._endings = (chosen.lower().lstrip("."),) if chosen else known
        self._classes = Labels.of_manifest(stream.manifest)
        self._label_sets = stream.manifest.label_sets
        self._bad: dict[int, str] = {}
        self._new: list[Substitute] = []
        self._url = ""
        self._num_opened = 0  # since the last usable sample

    def __iter__(self) -> Iterator[Batch | ValueError | OSError]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        key = self._cursor.seed, self._cursor.samples, self._part.start, number
        rng = random.Random(" ".join(map(str, key)))
        samples = group_by_keys(self._members(rng), handler=self._skip_file)
        samples = webdataset.shuffle(self._stream.buffer, rng=rng)(samples)
        try:
            for batch in itertools.count(number, count):
                start = self._cursor.samples + batch * self._step
                side = self._sides.at(start)
                rows = list(itertools.islice(self._items(samples, start, side), len(self._part)))
                found, numbers = [row[1] for row in rows], [row[2] for row in rows]
                labels, offsets = label_tensors(
                    found if self._label_sets else np.array(found, np.int64)
                )
                skipped, self._new = tuple(self._new), []
                yield Batch(
                    self._inputs.collate((row[0] for row in rows), len(rows), side=side),
                    labels,
                    torch.tensor(numbers, dtype=torch.int64),
                    substitutes=skipped,
                    offsets=offsets,
                )
        except (ValueError, OSError) as error:
            yield error

    def _members(self, rng: random.Random) -> Iterator[dict[str, Any]]:
        """Yield the files of tars that are drawn with replacement, and {} after each tar.

        A damaged tar is skipped. Raises OSError for a tar that cannot be read, because this is not
        damage, and a restart may help; and ValueError if no tar has a usable sample.
        """
        while self._num_opened <= _MAX_OPENED + self._stream.buffer:
            self._num_opened += 1
            self._url = url = rng.choice(self._tars)
            try:
                with (
                    fsspec.open(url, "rb") as opened,
                    tarfile.open(fileobj=opened, mode="r|*") as tar,
                ):
                    for member in tar:
                        if member.size > _MAX_BYTES:
                            raise tarfile.TarError(f"{member.name} has {member.size:,} bytes")
                        if (content := tar.extractfile(member)) is not None:
                            yield {"fname": member.name, "data": content.read(), "__url__": url}
            except tarfile.TarError as error:
                self._skip(url, str(error))
            except FileNotFoundError:
                raise
            except OSError as error:
                raise OSError(f"{url} cannot be read: {error}") from error
            yield {}
        raise ValueError(
            f"the tars contain no usable samples: {'; '.join(list(self._bad.values())[:3])}: check "
            "data.stream.sample, data.stream.label_field and the class list of data.shards"
        )

    def _items(
        self, samples: Iterator[dict[str, Any]], start: int, side: int
    ) -> Iterator[tuple[Any, Any, int]]:
        """Yield (augmented sample, label, number) for the global batch that begins at `start`. With
        sets of labels, the label is an array, int64 [n].
        """
        for sample in samples:
            name = f"{sample['__url__']}: {sample['__key__']}"
            # The random values of a sample differ between epochs, and after a resume.
            epoch = self._cursor.samples + start // self._stream.samples
            key = np.array([epoch]), np.array([_number(name)])
            batch = self._inputs.training_batch(self._cursor.seed, *key, side=side)
            try:
                ending = next((one for one in self._endings if one in sample), None)
                label = next((one for one in LABEL_EXTENSIONS if one in sample), None)
                if ending is None or label is None:
                    raise ValueError(f"its image, text or label is missing: {sorted(sample)}")
                of_label = label, sample[label], self._stream.label_field
                texts = label_texts(*of_label, label_sets=self._label_sets)
                labels = sorted({*map(self._classes.label, texts)})
                row = np.array(labels, np.int64) if self._label_sets else labels[0], _number(name)
                decoded = batch.decode(0, sample[ending])
            except ValueError as error:
                self._skip(name, str(error))
                continue
            self._num_opened = 0
            yield batch.finish(decoded), *row

    def _skip_file(self, error: Exception) -> bool:
        """Record a file that a sample already has, and return True to continue."""
        self._skip(self._url, str(error.args[0]))
        return True

    def _skip(self, name: str, reason: str) -> None:
        number = _number(name)
        if number not in self._bad:
            self._bad[number] = f"{name}: {reason}"
            self._new.append(Substitute(number, None, self._bad[number]))
            check_limit(self._bad, self._max_bad)


def _number(name: str) -> int:
    """Return a 63-bit hash that identifies a sample on every rank and in every run."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
