"""One split of a folder of shards as a random-access list of samples, read by `pread`.

It knows nothing of order, ranks or pixels.
"""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from data.index import ShardIndex, check_labels, open_index, read_key, read_member
from data.manifest import ClassInfo, Manifest

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
            check_labels(index.labels, self.num_classes, path)
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

    def key(self, i: int) -> str:
        """The webdataset key of sample `i`."""
        shard, row = self._place(i)
        return read_key(self._file(shard), self._indices[shard], row)

    def read(self, i: int) -> tuple[bytes, str, int]:
        """(bytes, extension, label) of sample `i`; ValueError where its checksum does not hold."""
        shard, row = self._place(i)
        index = self._indices[shard]
        data = read_member(self._file(shard), index, row)
        if data is None:
            raise ValueError(
                f"{self.folder / self._shards[shard].file}: the bytes of {self._name(i)} are not "
                f"those that were written: see kway shard verify {self.folder}"
            )
        return data, index.extensions[int(index.extension[row, 0])], int(index.labels[row])

    def _name(self, i: int) -> str:
        """The key, or the position where the damage reaches the header that holds the key."""
        try:
            return self.key(i)
        except ValueError:
            return f"sample {i} of split {self.name}"

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


def open_split(shards: Path, split: str) -> Split:
    """Open one split of a folder that `kway shard` made.

    Raises FileNotFoundError or ValueError as `Manifest.load` does, and ValueError for an unknown
    split, an index that does not fit its shard, or a label without a class.
    """
    folder = Path(shards)
    manifest = Manifest.load(folder)
    try:
        return Split(folder, manifest, split)
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from error
