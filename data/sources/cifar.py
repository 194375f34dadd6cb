"""CIFAR-10 and CIFAR-100 in their published binary versions, archived or unpacked.

A record consists of one label byte (two for CIFAR-100: the coarse and the fine label) and 3,072
bytes of pixels: the red, green and blue planes (Krizhevsky 2009). The Python and MATLAB versions
are not supported.
"""

import hashlib
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.option import Argument
from data.shards.hierarchy import PATH, join_path
from data.sources.archive import published_files
from data.sources.input_files import Input
from data.sources.pixels import PixelSource
from data.sources.source import STRICT

_SIDE = 32


@dataclass(frozen=True, config=STRICT)
class _Cifar(PixelSource):
    """The base class of CIFAR-10 and CIFAR-100.

    path: the tar.gz archive, or a folder that contains either its files or the unpacked folder.
    """

    path: Annotated[
        Input,
        Argument(metavar="ARCHIVE"),
        Field(description="binary version: the tar.gz archive or its unpacked folder"),
    ]

    held_out = "the published test images"
    archive: ClassVar[str]
    unpacked: ClassVar[str]
    files: ClassVar[dict[str, tuple[str, ...]]]  # the files of each split
    labels: ClassVar[tuple[str, ...]]  # name file of each label byte; the last is the class

    def parameters(self) -> dict[str, Any]:
        content = hashlib.sha256(b"".join(self._contents.values()))
        return {"content": content.hexdigest()[:16]}

    @property
    def class_names(self) -> list[str]:
        return self._names(self.labels[-1])

    @property
    def arrays(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        num_labels = len(self.labels)
        arrays = {}
        for split in self.files:
            records = self._records(split)
            planes = records[:, num_labels:].reshape(-1, 3, _SIDE, _SIDE)
            arrays[split] = planes.transpose(0, 2, 3, 1), records[:, num_labels - 1]
        return arrays

    def _records(self, split: str) -> np.ndarray:
        """Return the records of a split, uint8 [N, size], after checking their labels."""
        size = len(self.labels) + 3 * _SIDE * _SIDE
        limits = [len(self._names(file)) for file in self.labels]
        found = []
        for file in self.files[split]:
            content = np.frombuffer(self._contents[file], np.uint8)
            whole = content[: len(content) // size * size].reshape(-1, size)
            if not whole.size or len(content) % size or (whole[:, : len(limits)] >= limits).any():
                raise ValueError(
                    f"{self.path}: {file} is damaged: its size is not a multiple of {size:,} "
                    "bytes, or a label has no name: download it again"
                )
            found.append(whole)
        return np.concatenate(found)

    def _names(self, file: str) -> list[str]:
        lines = self._contents[file].decode("utf-8", "replace").splitlines()
        names = [line.strip() for line in lines if line.strip()]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"{self.path}: {file} is not a list of class names: download it again")
        return names

    @cached_property
    def _contents(self) -> dict[str, bytes]:
        """The content of each file that is read, by file name."""
        names = (*(file for files in self.files.values() for file in files), *self.labels)
        published = f"the binary version ({self.archive})"
        found = published_files(self.path, self.unpacked, names, published)
        return {name: found[name] for name in names}


class Cifar10(_Cifar):
    """CIFAR-10 from the published file cifar-10-binary.tar.gz."""

    kind = "cifar10"
    reads = "cifar-10-binary.tar.gz (a 170 MB download)"
    archive = "cifar-10-binary.tar.gz"
    unpacked = "cifar-10-batches-bin"
    files: ClassVar = {
        "train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        "test": ("test_batch.bin",),
    }
    labels = ("batches.meta.txt",)


class Cifar100(_Cifar):
    """CIFAR-100 from the published file cifar-100-binary.tar.gz.

    The 20 coarse classes become the hierarchy of the 100 classes.
    """

    kind = "cifar100"
    reads = "cifar-100-binary.tar.gz (a 168 MB download)"
    archive = "cifar-100-binary.tar.gz"
    unpacked = "cifar-100-binary"
    files: ClassVar = {"train": ("train.bin",), "test": ("test.bin",)}
    labels = ("coarse_label_names.txt", "fine_label_names.txt")

    def classes(self) -> tuple[ClassInfo, ...]:
        coarse = self._names(self.labels[0])
        records = np.concatenate([self._records(split)[:, :2] for split in self.files])
        above = {fine: coarse[one] for one, fine in np.unique(records, axis=0).tolist()}
        return tuple(
            ClassInfo(name=name, attributes={PATH: join_path([above[i]])} if i in above else {})
            for i, name in enumerate(self.class_names)
        )
