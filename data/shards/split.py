"""A split of a folder of shards as a random-access list of samples, read with `pread`.

This module does not depend on ranks or pixels. It uses an order only to prefetch shards.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from data.loading.order import InOrder, Order
from data.loading.substitute import BadSampleError
from data.messages import printable
from data.remote.config import DEFAULT_CACHE, CacheConfig, is_url
from data.remote.folder import RemoteFolder
from data.remote.prefetch import ShardPrefetcher
from data.retry import retried
from data.shards.folder import LocalFolder, OpenShards, ShardFolder
from data.shards.index import ShardIndex, check_labels, read_key, read_member
from data.shards.manifest import ClassInfo, Manifest
from data.tars.headers import BLOCK


class Split:
    """A split: samples 0 to len - 1 in shard order.

    Open a split with `open_split`, and `close` it or use `with`. A split is safe to use after fork,
    because `pread` does not move the file position. It is cheap to pickle: a spawned process
    receives the number of classes but not their names. Every read is retried after a transient
    error (`data/retry.py`) and raises RetriesExhaustedError if all attempts fail.
    """

    def __init__(self, folder: ShardFolder, manifest: Manifest, name: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name = name
        self.num_classes = len(manifest.classes)
        self._open()

    def _open(self) -> None:
        self._shards = self.manifest.of_split(self.name)
        self._files = OpenShards(self.folder, self._shards)
        self._indices: list[ShardIndex] = retried(
            str(self.folder), lambda: self.folder.indices(self._shards)
        )
        self._ahead = ShardPrefetcher(self.folder, self._shards)
        self._starts = np.cumsum([0, *(shard.samples for shard in self._shards)])
        self._all = Order(0, [shard.samples for shard in self._shards])

    def __getstate__(self) -> dict[str, Any]:
        # The class list may be long, but reading does not need it.
        return {
            "folder": self.folder,
            "manifest": self.manifest.model_copy(update={"classes": ()}),
            "name": self.name,
            "num_classes": self.num_classes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def classes(self) -> tuple[ClassInfo, ...]:
        """The class list. A label is a position in this list."""
        assert len(self.manifest.classes) == self.num_classes, "class names are not pickled"
        return self.manifest.classes

    @property
    def labels(self) -> np.ndarray:
        """The labels of all samples, int64 [len], as a new array."""
        return np.concatenate([index.labels for index in self._indices]).astype(np.int64)

    def class_counts(self) -> np.ndarray:
        """Return the number of samples of each class, int64 [K].

        Out-of-range labels are not counted.
        """
        counts = np.zeros(self.num_classes, np.int64)
        for index in self._indices:
            labels = index.labels[_has_class(index, self.num_classes)]
            counts += np.bincount(labels, minlength=self.num_classes)
        return counts

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the samples and their order."""
        return self.manifest.digest(self.name)

    def sizes(self, samples: np.ndarray) -> np.ndarray:
        """Return the size in bytes, int64 [n], of each of `samples` (int64 [n], in any order)."""
        found = np.empty(len(samples), np.int64)
        shards = np.searchsorted(self._starts, samples, side="right") - 1
        for shard in np.unique(shards).tolist():
            here = shards == shard
            found[here] = self._indices[shard].sizes[samples[here] - self._starts[shard], 0]
        return found

    def first_of(self, classes: Sequence[int], each: int) -> dict[int, list[int]]:
        """Return the first `each` samples of each of `classes`, in the order of the split."""
        found: dict[int, list[int]] = {label: [] for label in classes}
        for start, index in zip(self._starts.tolist(), self._indices, strict=False):
            if all(len(samples) >= each for samples in found.values()):
                break
            for row in np.flatnonzero(np.isin(index.labels, classes)).tolist():
                samples = found[int(index.labels[row])]
                if len(samples) < each:
                    samples.append(start + row)
        return found

    def key(self, i: int) -> str:
        """Return the webdataset key of sample `i`."""
        shard, row = self._locate(i)
        return self._files.read(shard, read_key, self._indices[shard], row)

    def read(self, i: int) -> tuple[bytes, str, int]:
        """Return (bytes, extension, label) of sample `i`.

        Raises BadSampleError if its checksum does not match or its label is out of range.
        """
        shard, row = self._locate(i)
        index = self._indices[shard]
        data = self._files.read(shard, read_member, index, row)
        if data is None:
            remedy = self.folder.remedy(self._shards[shard])
            raise self.bad(i, f"its checksum does not match: {remedy}")
        label = int(index.labels[row])
        if not 0 <= label < self.num_classes:
            raise self.bad(i, f"label {label} is out of range for {self.num_classes} classes")
        return data, index.extensions[int(index.extension[row, 0])], label

    def read_many(self, samples: np.ndarray) -> tuple[np.ndarray, Iterator[bytes | None]]:
        """Return the labels of `samples` (int64 [n]), int64 [n], and an iterator over their bytes.

        The iterator reads one sample at a time. It yields None for a bad sample. An out-of-range
        label is returned as 0. The index entries are looked up in one batch, because lookups take
        most of the time for small samples.
        """
        shards, blocks, sizes, crc32, labels = self._entries(samples)
        has_class = (labels >= 0) & (labels < self.num_classes)
        # No checksum is negative, so samples without a class are bad.
        columns = shards, sizes, blocks * BLOCK, np.where(has_class, crc32, -1)
        return np.where(has_class, labels, 0), self._contents(*(one.tolist() for one in columns))

    def _contents(
        self, shards: list[int], sizes: list[int], offsets: list[int], crc32: list[int]
    ) -> Iterator[bytes | None]:
        pread, checksum = self._files.pread, isal_zlib.crc32
        for shard, size, offset, expected in zip(shards, sizes, offsets, crc32, strict=True):
            data = pread(shard, size, offset)
            yield data if checksum(data) == expected else None

    def _entries(self, samples: np.ndarray) -> np.ndarray:
        """Return the shard, block, size, crc32 and label of each of `samples`, int64 [5, n]."""
        shards = np.searchsorted(self._starts, samples, side="right") - 1
        table = np.empty((5, len(samples)), np.int64)
        table[0] = shards
        for shard in np.unique(shards).tolist():
            here, index = np.flatnonzero(shards == shard), self._indices[shard]
            rows = samples[here] - self._starts[shard]
            columns = index.blocks[:, 0], index.sizes[:, 0], index.crc32[:, 0], index.labels
            for number, column in enumerate(columns, start=1):
                table[number, here] = column[rows]
        return table

    def text(self, i: int) -> tuple[str, int]:
        """Return (text, label) of sample `i`.

        Raises the errors of `read`, and BadSampleError for invalid UTF-8.
        """
        data, _, label = self.read(i)
        try:
            return decode_text(data), label
        except ValueError as error:
            raise self.bad(i, str(error)) from error

    def bad(self, i: int, reason: str) -> BadSampleError:
        """Return an error that names the shard and key of sample `i`."""
        address = self.folder.address(self._shards[self._locate(i)[0]])
        return BadSampleError(f"{address}: {printable(self._name(i))}: {reason}")

    def _name(self, i: int) -> str:
        """Return the key, or the position if the tar header that contains the key is damaged."""
        try:
            return self.key(i)
        except ValueError:
            return f"sample {i} of split {self.name}"

    def check_labels(self, max_bad: int) -> None:
        """Raise ValueError if more than `max_bad` labels are out of range."""
        has_class = (_has_class(index, self.num_classes) for index in self._indices)
        if len(self) - sum(np.count_nonzero(sound) for sound in has_class) > max_bad:
            for shard, index in zip(self._shards, self._indices, strict=True):
                check_labels(index.labels, self.num_classes, self.folder.address(shard))

    def check_shards(self) -> None:
        """Raise ValueError for a shard file that does not belong to its index.

        The size has already been checked. If the checksums of both the first and the last sample
        are wrong, the file is a different shard; a single bad sample is not sufficient evidence.
        Shards from a URL are not checked here, because their SHA-256 is verified when they are
        fetched.
        """
        if self.folder.verified:
            return
        for number, (shard, index) in enumerate(zip(self._shards, self._indices, strict=True)):
            last = shard.samples - 1
            ends = {(0, 0), (last, 0)} if last else {(0, 0), (0, 1)}
            if all(self._files.read(number, read_member, index, *end) is None for end in ends):
                raise ValueError(
                    f"{self.folder.address(shard)} was replaced by another file: copy the shard "
                    f"again and {self.folder.remedy(shard)}"
                )

    def order(
        self, seed: int, shuffle_shards: int | None = None, *, groups_at_once: int = 1
    ) -> Order:
        """Return the training order.

        Raises ValueError if the cache of a URL is too small for `groups_at_once` groups.
        """
        order = Order(seed, [shard.samples for shard in self._shards], shuffle_shards)
        self.folder.check_order(order, self._shards, groups_at_once)
        return order

    def in_order(self) -> InOrder:
        """Return the evaluation order, which is the stored order."""
        return InOrder([shard.samples for shard in self._shards])

    def will_read(self, order: Order | InOrder, position: int) -> None:
        """Set the read position in `order`. If the split is at a URL, the next shards are then
        prefetched.

        Threads of this process fetch the shards. The call is cheap enough to make for every batch.
        It has no effect for a local folder.
        """
        self._ahead.will_read(order, position)

    def will_read_all(self, position: int) -> None:
        """Like `will_read`, in an order that reads all shards at the same time."""
        self.will_read(self._all, position)

    def _locate(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(
                f"sample {i} is out of range: split {self.name!r} has {len(self)} samples"
            )
        shard = int(np.searchsorted(self._starts, i, side="right")) - 1
        return shard, i - int(self._starts[shard])

    def close(self) -> None:
        """Close the shards and stop prefetching. A later read opens them again."""
        self._ahead.stop()
        self._files.close()

    def __enter__(self) -> "Split":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_starts"):
            self.close()


def _has_class(index: ShardIndex, num_classes: int) -> np.ndarray:
    # A negative label becomes a large number if it is viewed as unsigned.
    sound: np.ndarray = index.labels.view(np.uint32) < num_classes
    return sound


def _open_folder(shards: Path | str, cache: CacheConfig) -> ShardFolder:
    """Return the folder at a local path, or at a URL that is read through `cache`.

    Raises ValueError for an unknown URL scheme.
    """
    if is_url(shards):
        return RemoteFolder(str(shards), cache)
    return LocalFolder(Path(shards))


def open_split(
    shards: Path | str,
    split: str,
    *,
    max_bad_labels: int = 0,
    cache: CacheConfig = DEFAULT_CACHE,
    manifest: Manifest | None = None,
) -> Split:
    """Open one split of a folder written by `kway shard`, at a path or at a URL that is read
    through `cache`.

    manifest: the manifest of the folder, if it is already loaded; loading may be slow.

    Raises the errors of `Manifest.load`, and ValueError for an unknown split, an index that does
    not match its shard, a replaced shard, or more than `max_bad_labels` labels that are out of
    range.
    """
    folder = _open_folder(shards, cache)
    if manifest is None:
        manifest = Manifest.load(shards, cache)
    try:
        opened = Split(folder, manifest, split)
        opened.check_labels(max_bad_labels)
        opened.check_shards()
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from error
    return opened


def decode_text(data: bytes) -> str:
    """Decode UTF-8. Raises ValueError with the byte position if `data` is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
