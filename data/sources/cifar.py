"""CIFAR-10 and CIFAR-100 in their published binary versions, archived or unpacked.

A record consists of one label byte (two for CIFAR-100: the coarse and the fine label) and 3,072
bytes of pixels: the red, green and blue planes (Krizhevsky 2009). The Python and MATLAB versions
are not supported.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.option import Argument
from data.remote.input_path import Input, InputPath
from data.shards.hierarchy import PATH, join_path
from data.shards.manifest import ClassInfo, SourceInfo
from data.sources.archive import archived_files, loose_files
from data.sources.packing import lossless
from data.sources.source import STRICT, CommandSource, Sample

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE


class _Task(NamedTuple):
    key: str
    label: int
    pixels: bytes


@dataclass(frozen=True, config=STRICT)
class _Cifar(CommandSource):
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
    published: ClassVar[int]  # the number of records in all files
    labels: ClassVar[tuple[str, ...]]  # name file of each label byte; the last is the class

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist: download {self.archive}")

    def describe(self) -> SourceInfo:
        content = hashlib.sha256()
        for name in self._file_names:
            content.update(self._contents[name])
        return SourceInfo(kind=self.kind, parameters={"content": content.hexdigest()[:16]})

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self._names(self.labels[-1]))

    def splits(self) -> dict[str, Sequence[_Task]]:
        num_labels = len(self.labels)
        return {
            split: [
                _Task(f"{split}-{i:05d}", record[num_labels - 1], record[num_labels:])
                for i, record in enumerate(self._records(split))
            ]
            for split in self.files
        }

    def render(self, task: _Task) -> Sample:
        planes = np.frombuffer(task.pixels, np.uint8).reshape(3, _SIDE, _SIDE)
        image = np.ascontiguousarray(planes.transpose(1, 2, 0))
        return Sample(task.key, lossless(image), "png", task.label)

    @property
    def origin(self) -> InputPath:
        return self.path

    def notes(self) -> list[str]:
        """Return a line if the number of images differs from the published number."""
        found = sum(1 for split in self.files for _ in self._records(split))
        if found == self.published:
            return []
        return [f"found {found:,} images, but {self.kind} was published with {self.published:,}"]

    def _records(self, split: str) -> Iterator[bytes]:
        """Yield the records of a split after checking their labels."""
        size = len(self.labels) + _PIXELS
        limits = [len(self._names(file)) for file in self.labels]
        for file in self.files[split]:
            content = self._contents[file]
            if not content or len(content) % size:
                raise ValueError(
                    f"{self.path}: {file} has {len(content):,} bytes, which is not a multiple of "
                    f"the record size, {size:,}: download it again"
                )
            for i in range(0, len(content), size):
                record = content[i : i + size]
                for label, limit, names in zip(record, limits, self.labels, strict=False):
                    if label >= limit:
                        raise ValueError(
                            f"{self.path}: image {i // size} of {file} has label {label}, but "
                            f"{names} contains only {limit} names: download it again"
                        )
                yield record

    def _names(self, file: str) -> list[str]:
        lines = self._contents[file].decode("utf-8", "replace").splitlines()
        names = [line.strip() for line in lines if line.strip()]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(f"{self.path}: {file} is not a list of class names: download it again")
        return names

    @property
    def _file_names(self) -> tuple[str, ...]:
        return (*(file for files in self.files.values() for file in files), *self.labels)

    @cached_property
    def _contents(self) -> dict[str, bytes]:
        """Return the content of each file that is read, by file name."""
        if self.path.is_dir():
            inner = self.path / self.unpacked
            found = loose_files(inner if inner.is_dir() else self.path, self._file_names)
        else:
            found = archived_files(self.path, self._file_names)
        if missing := [name for name in self._file_names if name not in found]:
            raise FileNotFoundError(
                f"{self.path} does not contain {missing[0]}: use the binary version, {self.archive}"
            )
        return found


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
    published = 60_000
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
    published = 60_000
    labels = ("coarse_label_names.txt", "fine_label_names.txt")

    def classes(self) -> tuple[ClassInfo, ...]:
        coarse_file, fine_file = self.labels
        coarse_names, fine_names = self._names(coarse_file), self._names(fine_file)
        coarse_of: dict[int, int] = {}
        for split in self.files:
            for record in self._records(split):
                if coarse_of.setdefault(record[1], record[0]) != record[0]:
                    raise ValueError(
                        f"{self.path}: {fine_names[record[1]]!r} is in two coarse classes: "
                        "download it again"
                    )
        return tuple(
            ClassInfo(
                name=name,
                attributes={PATH: join_path([coarse_names[coarse_of[i]]])}
                if i in coarse_of
                else {},
            )
            for i, name in enumerate(fine_names)
        )
