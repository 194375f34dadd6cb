"""One split of a folder of shards as a random-access list of samples, read by `pread`.

It knows nothing of order, ranks or pixels.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.index import ShardIndex, check_labels, open_index, read_key, read_member
from data.manifest import ClassInfo, Manifest
from data.substitute import BadSampleError

_MAX_OPEN_FILES = 256


class Split:
    """Samples 0..len-1 in shard order. Open one with `open_split`; `close` it, or use `with`.

    Safe after fork (`pread` moves no file position) and cheap to send to a spawned process.
    """

    def __init__(self, folder: Path, manifest: Manifest, name: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name = name
        self._open()

    def _open(self) -> None:
        self._files: OrderedDict[int, int] = OrderedDict()
        self._shards = self.manifest.of_split(self.name)
        self._indices: list[ShardIndex] = []
        for shard in self._shards:
            path = self.folder / shard.file
            index = open_index(path)
            if index.info != shard:
                raise ValueError(
                    f"the index of {path} belongs to other shards than the manifest: "
                    "delete the folder and run kway shard again"
                )
            self._indices.append(index)
        self._starts = np.cumsum([0, *(shard.samples for shard in self._shards)])

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "manifest": self.manifest, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def classes(self) -> tuple[ClassInfo, ...]:
        """The class list; a label is a position in it."""
        return self.manifest.classes

    @property
    def num_classes(self) -> int:
        return len(self.manifest.classes)

    @property
    def labels(self) -> np.ndarray:
        """Labels of all samples, int64 [len]; a fresh array."""
        return np.concatenate([index.labels for index in self._indices]).astype(np.int64)

    def class_counts(self) -> np.ndarray:
        """Samples of each class, int64 [K], less those whose label has no class."""
        counts = np.zeros(self.num_classes, np.int64)
        for index in self._indices:
            labels = index.labels[_has_class(index, self.num_classes)]
            counts += np.bincount(labels, minlength=self.num_classes)
        return counts

    def first_of(self, classes: Sequence[int], each: int) -> dict[int, list[int]]:
        """The first `each` samples of each of `classes`, in the order of the split."""
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
        """The webdataset key of sample `i`."""
        shard, row = self._place(i)
        return read_key(self._file(shard), self._indices[shard], row)

    def read(self, i: int) -> tuple[bytes, str, int]:
        """(bytes, extension, label) of sample `i`.

        Raises BadSampleError where the checksum does not hold or the label has no class.
        """
        shard, row = self._place(i)
        index = self._indices[shard]
        data = read_member(self._file(shard), index, row)
        if data is None:
            see = f"see kway shard verify {self.folder}"
            raise self.bad(i, f"its bytes are not those that were written: {see}")
        label = int(index.labels[row])
        if not 0 <= label < self.num_classes:
            raise self.bad(i, f"label {label} has no class: there are {self.num_classes}")
        return data, index.extensions[int(index.extension[row, 0])], label

    def text(self, i: int) -> tuple[str, int]:
        """(text, label) of sample `i`; BadSampleError as `read`, and for what is not UTF-8."""
        data, _, label = self.read(i)
        try:
            return data.decode("utf-8"), label
        except UnicodeDecodeError as error:
            raise self.bad(i, f"not UTF-8 from its byte {error.start} on") from error

    def bad(self, i: int, reason: str) -> BadSampleError:
        """An error that names the shard and key of sample `i`."""
        shard = self.folder / self._shards[self._place(i)[0]].file
        return BadSampleError(f"{shard}: {self._name(i)}: {reason}")

    def _name(self, i: int) -> str:
        """The key, or the position where the damage reaches the header that holds the key."""
        try:
            return self.key(i)
        except ValueError:
            return f"sample {i} of split {self.name}"

    def check_labels(self, max_bad: int) -> None:
        """Raise ValueError where more than `max_bad` labels have no class."""
        has_class = (_has_class(index, self.num_classes) for index in self._indices)
        if len(self) - sum(np.count_nonzero(sound) for sound in has_class) > max_bad:
            for shard, index in zip(self._shards, self._indices, strict=True):
                check_labels(index.labels, self.num_classes, self.folder / shard.file)

    def check_shards(self) -> None:
        """Raise ValueError for a shard that is another file than the one of the index.

        Its size is right, so its first and last sample are read: neither is there. One bad sample
        is no bad shard.
        """
        for number, (shard, index) in enumerate(zip(self._shards, self._indices, strict=True)):
            file, last = self._file(number), shard.samples - 1
            ends = {(0, 0), (last, 0)} if last else {(0, 0), (0, 1)}
            if all(read_member(file, index, row, column) is None for row, column in ends):
                raise ValueError(
                    f"{self.folder / shard.file} is not the shard that was written: another file "
                    f"stands in its place; copy it again (see kway shard verify {self.folder})"
                )

    def _place(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of split {self.name!r} with {len(self)}")
        shard = int(np.searchsorted(self._starts, i, side="right")) - 1
        return shard, i - int(self._starts[shard])

    def _file(self, shard: int) -> int:
        """Descriptor of a shard; the least recently used one is closed when many are open."""
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _MAX_OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        descriptor = os.open(self.folder / self._shards[shard].file, os.O_RDONLY)
        self._files[shard] = descriptor
        return descriptor

    def close(self) -> None:
        """Close the shards; a later read opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> "Split":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):
            self.close()


def _has_class(index: ShardIndex, num_classes: int) -> np.ndarray:
    # As unsigned numbers, the negative ones are large.
    sound: np.ndarray = index.labels.view(np.uint32) < num_classes
    return sound


def open_split(shards: Path, split: str, *, max_bad_labels: int = 0) -> Split:
    """Open one split of a folder that `kway shard` made.

    Raises FileNotFoundError or ValueError as `Manifest.load` does, and ValueError for an unknown
    split, an index that does not fit its shard, a shard that another file replaced, or more than
    `max_bad_labels` labels without a class.
    """
    folder = Path(shards)
    manifest = Manifest.load(folder)
    try:
        opened = Split(folder, manifest, split)
        opened.check_labels(max_bad_labels)
        opened.check_shards()
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from error
    return opened
