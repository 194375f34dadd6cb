"""A split of a folder of shards, or several, as a random-access list of samples, read with `pread`.

This module does not depend on ranks or pixels. It uses an order only to prefetch shards.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from data.classes.class_list import ClassList
from data.loading.order import Order
from data.messages import printable
from data.remote.config import DEFAULT_CACHE, CacheConfig, folder_or_url
from data.shards.index import ShardIndex
from data.shards.manifest import Manifest, ShardInfo, digest_of
from data.shards.shard_files import Shard, ShardFiles
from data.shards.split_index import index_bytes, open_split_index
from data.tars.headers import BLOCK, member_name


class BadSampleError(ValueError):
    """Raised for a sample that cannot be used for training. The message contains the shard, key and
    reason.
    """


class Part(NamedTuple):
    """A split of one folder at a path or URL.

    labels: the labels of its classes in the class list of the `Split`, int32 [K], or None if they
    are the same. weight: the relative number of samples that training draws from it.
    """

    folder: Path | str
    name: str
    shards: tuple[ShardInfo, ...]
    labels: np.ndarray | None = None
    weight: float = 1

    def united(self, labels: np.ndarray) -> np.ndarray:
        """Return `labels`, int32 [n], in the class list of the `Split`."""
        return labels if self.labels is None else self.labels[labels].astype(np.int32)

    def own(self, united: np.ndarray) -> np.ndarray:
        """Invert `united`."""
        if self.labels is None:
            return united
        own = np.zeros(int(self.labels.max()) + 1, np.int32)
        own[self.labels] = np.arange(len(self.labels))
        inverted: np.ndarray = own[united]
        return inverted

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the samples, their order and their classes."""
        found = digest_of(self.shards)
        if self.labels is None:
            return found
        content = f"{found}\n".encode() + self.labels.astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


class Split:
    """Samples 0 to len - 1 in shard order: those of one split or, for training on a mixture, of
    several `parts`, one after another.

    manifest: its class list contains the classes of all parts. Open a split with `open_split`, and
    `close` it or use `with`. A split is safe to use after fork, because `pread` does not move the
    file position. It is cheap to pickle: a spawned process receives the number of classes but not
    their names. Every read is retried after a transient error (`data/retry.py`) and raises
    RetriesExhaustedError if all attempts fail.
    """

    def __init__(self, parts: Sequence[Part], manifest: Manifest, cache: CacheConfig) -> None:
        self.parts = tuple(parts)
        self.manifest = manifest
        self.num_classes = len(manifest.classes)
        self.name = " + ".join(part.name for part in parts)
        self._cache = cache
        self._open()

    def _open(self) -> None:
        shards = [(part, Shard(part.folder, info)) for part in self.parts for info in part.shards]
        self._shards = [shard for _, shard in shards]
        self._sizes = [shard.info.samples for shard in self._shards]
        self._starts = np.cumsum([0, *self._sizes])
        size = index_bytes(self._shards)
        self.files = ShardFiles(self._shards, self._cache, index_size=size)

        def relabel(number: int, index: ShardIndex) -> np.ndarray:
            part, shard = shards[number]
            num_classes = self.num_classes if part.labels is None else len(part.labels)
            # A negative label becomes a large number if it is viewed as unsigned.
            bad = index.labels[index.labels.view(np.uint32) >= num_classes]
            if len(bad):
                raise ValueError(
                    f"{shard.address} has label {bad[0]}, but the manifest has {num_classes} "
                    "classes: run kway shard again with an empty folder"
                )
            labels = part.united(index.labels)
            if index.offsets is None or labels is index.labels:
                return labels
            return labels[np.lexsort([labels, samples_of(index.offsets)])]

        # With the number of classes in the key, the labels of a cached index were checked as well.
        key = " ".join([*(part.digest() for part in self.parts), str(self.num_classes)]).encode()
        self._index = open_split_index(self._shards, relabel, key, self._cache)

    def __getstate__(self) -> dict[str, Any]:
        # The class list may be long, but reading does not need it.
        names = ("parts", "num_classes", "name", "_cache")
        manifest = self.manifest.model_copy(update={"classes": None})
        return {"manifest": manifest, **{name: self.__dict__[name] for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def classes(self) -> ClassList:
        """The class list. A label is a position in this list."""
        assert self.manifest.classes is not None, "class names are not pickled"
        return self.manifest.classes

    @property
    def label_sets(self) -> bool:
        """Whether each sample has a set of labels, possibly empty, instead of one label."""
        return self._index.offsets is not None

    @property
    def labels(self) -> np.ndarray:
        """The labels of all samples as a new array: int64 [len] or, with sets of labels, int64
        [L], ascending within a sample.
        """
        return self._index.labels.astype(np.int64)

    @property
    def offsets(self) -> np.ndarray | None:
        """With sets of labels, where the labels of each sample begin and the last ones end, int64
        [len + 1]. None with one label per sample.
        """
        return self._index.offsets

    def class_counts(self) -> np.ndarray:
        """Return the number of samples of each class, int64 [K]."""
        return np.bincount(self._index.labels, minlength=self.num_classes)

    def samples_of_class(self, label: int) -> np.ndarray:
        """Return the samples that have a label, int64 [n], in ascending order."""
        positions = np.flatnonzero(self._index.labels == label)
        if self._index.offsets is None:
            return positions
        return np.searchsorted(self._index.offsets, positions, side="right") - 1

    def labels_of_parts(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Return the labels of the samples of each part in its own class list, int32 [n], and their
        offsets, which are None with one label per sample.
        """
        labels, offsets = self._index.labels, self._index.offsets
        ends = np.cumsum([0, *(sum(info.samples for info in part.shards) for part in self.parts)])
        found: list[tuple[np.ndarray, np.ndarray | None]] = []
        for part, (start, end) in zip(self.parts, pairwise(ends.tolist()), strict=True):
            if offsets is None:
                found.append((part.own(labels[start:end]), None))
            else:
                of_part = offsets[start : end + 1]
                first, last = of_part[[0, -1]].tolist()
                found.append((part.own(labels[first:last]), of_part - first))
        return found

    def digest(self) -> str | dict[str, str]:
        """Return 16 hexadecimal digits that identify the samples, their order and, in a mixture,
        their classes; for a mixture, those of each part.
        """
        if self.parts[0].labels is None:
            return self.parts[0].digest()
        return {f"{part.folder} {part.name}": part.digest() for part in self.parts}

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """Return the size in bytes, int64 [n], of each of `samples` (int64 [n], in any order)."""
        return self._index.places[samples, 1].astype(np.int64)

    def checksums(self) -> np.ndarray:
        """Return the size and crc32 of each sample as one number, uint64 [len]."""
        _, sizes, crc32 = self._index.places.T.astype(np.uint64)
        combined: np.ndarray = sizes << np.uint64(32) | crc32
        return combined

    def key(self, i: int) -> str:
        """Return the webdataset key of sample `i`."""
        shard = self._shard_of(i)
        name = self.files.read(shard, member_name, int(self._index.places[i, 0]))
        return name.removesuffix(f".{self._extension(i)}")

    def _extension(self, i: int) -> str:
        return self._index.extensions[int(self._index.extension[i])]

    def read(self, i: int) -> tuple[bytes, str, Any]:
        """Return (bytes, extension, label) of sample `i`. With sets of labels, the label is an
        array, int64 [n], in ascending order.

        Raises BadSampleError if its checksum does not match.
        """
        shard = self._shard_of(i)
        (label,), contents = self.read_many(np.array([i]))
        if (data := next(contents)) is None:
            raise self.bad(i, f"its checksum does not match: {self.files.remedy(shard)}")
        return data, self._extension(i), label if self.label_sets else int(label)

    def read_many(self, samples: np.ndarray) -> tuple[Any, Iterator[bytes | None]]:
        """Return the labels of `samples` (int64 [n]), int64 [n], and an iterator over their bytes.
        With sets of labels, the labels are a list of one array per sample.

        The iterator reads one sample at a time. It yields None for a bad sample. The index entries
        are looked up in one batch, because lookups take most of the time for small samples.
        """
        if (offsets := self._index.offsets) is not None:
            starts, ends = offsets[samples], offsets[samples + 1]
            # The labels of a sample are adjacent, and end at `within` in the batch.
            within = np.cumsum(ends - starts)
            positions = np.repeat(ends - within, ends - starts) + np.arange(within[-1:].sum())
            labels = self._index.labels[positions].astype(np.int64)
            sets = [labels[start:end] for start, end in pairwise([0, *within.tolist()])]
            return sets, self._contents(samples)
        return self._index.labels[samples].astype(np.int64), self._contents(samples)

    def _contents(self, samples: np.ndarray) -> Iterator[bytes | None]:
        """Yield the bytes of `samples`, or None where the checksum differs."""
        shards = np.searchsorted(self._starts, samples, side="right") - 1
        blocks, sizes, crc32 = self._index.places[samples].T.astype(np.int64)
        lists = (column.tolist() for column in (shards, sizes, blocks * BLOCK, crc32))
        opened, checksum = self.files.opened, isal_zlib.crc32
        for shard, size, offset, expected in zip(*lists, strict=True):
            try:
                data = os.pread(opened[shard], size, offset)
            except (KeyError, OSError):  # the shard is not open, or the read must be retried
                data = self.files.read(shard, os.pread, size, offset)
            yield data if checksum(data) == expected else None

    def text(self, i: int) -> tuple[str, Any]:
        """Return (text, label) of sample `i`, with a label as in `read`.

        Raises the errors of `read`, and BadSampleError for invalid UTF-8.
        """
        data, _, label = self.read(i)
        try:
            return decode_text(data), label
        except ValueError as error:
            raise self.bad(i, str(error)) from error

    def bad(self, i: int, reason: str) -> BadSampleError:
        """Return an error that names the shard and key of sample `i`."""
        try:
            name = self.key(i)
        except ValueError:  # the tar header is damaged
            name = f"sample {i} of split {self.name}"
        address = self._shards[self._shard_of(i)].address
        return BadSampleError(f"{address}: {printable(name)}: {reason}")

    @property
    def addresses(self) -> list[str]:
        """The path or URL of each shard."""
        return [shard.address for shard in self._shards]

    def order(
        self, seed: int, shuffle_shards: int | None = None, *, groups_at_once: int = 1
    ) -> Order:
        """Return the training order.

        Raises ValueError if the cache of a URL is too small for `groups_at_once` groups.
        """
        order = Order(seed, self._sizes, shuffle_shards)
        self.files.check_order(order, groups_at_once)
        return order

    def _shard_of(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range: split {self.name!r} has {len(self)} samples"
            )
        return int(np.searchsorted(self._starts, i, side="right")) - 1

    def close(self) -> None:
        """Close the shards and stop prefetching. A later read opens them again."""
        self.files.close()

    def __enter__(self) -> "Split":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "files"):
            self.close()


def open_split(
    shards: Path | str,
    split: str,
    *,
    cache: CacheConfig = DEFAULT_CACHE,
    manifest: Manifest | None = None,
) -> Split:
    """Open one split of a folder written by `kway shard`, or of a URL read through `cache`.

    manifest: the manifest of the folder, if it is already loaded; loading may be slow.

    Raises the errors of `Manifest.load`, and ValueError for an unknown split, an index that does
    not match the manifest, or a label that is out of range.
    """
    if manifest is None:
        manifest = Manifest.load(shards, cache)
    folder = folder_or_url(str(shards))
    try:
        part = Part(folder, split, manifest.of_split(split))
        return Split([part], manifest, cache)
    except ValueError as error:
        if str(shards) in str(error):
            raise
        raise ValueError(f"{shards}: {error}") from error


def samples_of(offsets: np.ndarray) -> np.ndarray:
    """Return the sample of each label, int64 [offsets[-1]]. offsets: as in `Split`, from 0."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def decode_text(data: bytes) -> str:
    """Decode UTF-8. Raises ValueError with the byte position if `data` is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
