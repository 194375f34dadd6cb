"""CIFAR-10 and CIFAR-100 in their published binary versions, archived or unpacked.

A record consists of one label byte (two for CIFAR-100: the coarse and the fine label) and 3,072
bytes of pixels: the red, green and blue planes (Krizhevsky 2009). The Python and MATLAB versions
are not supported.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.input_path import Input
from data.option import Argument
from data.shards.hierarchy import PATH, join_path
from data.shards.manifest import SourceInfo
from data.sources.archive import published_files
from data.sources.packing import PixelTask, render_pixels
from data.sources.source import STRICT, Sample, Source

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


@dataclass(frozen=True, config=STRICT)
class _Cifar(Source):
    """The base class of CIFAR-10 and CIFAR-100.

    path: the tar.gz archive, or a folder that contains either its files or the unpacked folder.
    """

    path: Annotated[
        Input,
        Argument(metavar="ARCHIVE"),
        Field(description="binary version: the tar.gz archive or its unpacked folder"),
    ]

    modality = "image"
    held_out = "the published test images"
    compares_splits = True
    archive: ClassVar[str]
    unpacked: ClassVar[str]
    files: ClassVar[dict[str, tuple[str, ...]]]  # the files of each split
    labels: ClassVar[tuple[str, ...]]  # name file of each label byte; the last is the class
    published: ClassVar[int] = 60_000  # the number of records in all files

    def describe(self) -> SourceInfo:
        content = hashlib.sha256(b"".join(self._contents.values()))
        return SourceInfo(kind=self.kind, parameters={"content": content.hexdigest()[:16]})

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self._names(self.labels[-1]))

    def splits(self) -> dict[str, Sequence[PixelTask]]:
        num_labels = len(self.labels)
        return {
            split: [
                PixelTask(f"{split}-{i:05d}", int(record[num_labels - 1]), record[num_labels:])
                for i, record in enumerate(self._records(split))
            ]
            for split in self.files
        }

    def render(self, task: PixelTask) -> Sample:
        planes = task.pixels.reshape(3, _SIDE, _SIDE)
        return render_pixels(task._replace(pixels=planes.transpose(1, 2, 0)))

    @property
    def origin(self) -> Path:
        return self.path

    def notes(self) -> list[str]:
        """Return a line if the number of images differs from the published number."""
        found = sum(len(self._records(split)) for split in self.files)
        if found == self.published:
            return []
        return [f"found {found:,} images, but {self.kind} was published with {self.published:,}"]

    def _records(self, split: str) -> np.ndarray:
        """Return the records of a split, uint8 [N, size], after checking their labels."""
        size = len(self.labels) + _PIXELS
        limits = [len(self._names(file)) for file in self.labels]
        records = []
        for file in self.files[split]:
            content = np.frombuffer(self._contents[file], np.uint8)
            if not len(content) or len(content) % size:
                raise ValueError(
                    f"{self.path}: {file} has {len(content):,} bytes, which is not a multiple of "
                    f"the record size, {size:,}: download it again"
                )
            records.append(content.reshape(-1, size))
            wrong = np.argwhere(records[-1][:, : len(limits)] >= limits)
            for i, byte in wrong[:1]:
                raise ValueError(
                    f"{self.path}: image {i} of {file} has label {records[-1][i, byte]}, but "
                    f"{self.labels[byte]} contains only {limits[byte]} names: download it again"
                )
        return np.concatenate(records)

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
        coarse_names, fine_names = map(self._names, self.labels)
        records = np.concatenate([self._records(split)[:, :2] for split in self.files])
        found: dict[int, int] = {}
        for coarse, fine in np.unique(records, axis=0).tolist():
            if found.setdefault(fine, coarse) != coarse:
                raise ValueError(
                    f"{self.path}: {fine_names[fine]!r} is in two coarse classes: download it again"
                )
        paths = {fine: {PATH: join_path([coarse_names[one]])} for fine, one in found.items()}
        return tuple(
            ClassInfo(name=name, attributes=paths.get(i, {})) for i, name in enumerate(fine_names)
        )
