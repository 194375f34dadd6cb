"""The base class of sources of image files that are listed before they are read.

Images that are larger than needed are resized and stored as JPEG. The bytes of all other images are
stored unchanged.
"""

import hashlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.remote.input_path import Input, InputPath
from data.shards.hierarchy import PATH, join_path
from data.shards.manifest import ClassInfo
from data.skipped import Skipped, by_reason
from data.sources.layouts.class_folders import ENDINGS, File, Listing
from data.sources.packing import PackedImages, webdataset_keys
from data.sources.source import STRICT, CommandSource, Sample


class ListedTask(NamedTuple):
    """An image file. path: its path relative to the folder of the source."""

    path: str
    label: int
    key: str


@dataclass(frozen=True, config=STRICT)
class ListedImages(PackedImages, CommandSource):
    """A source of image files in `folder`. A subclass lists the files and their classes."""

    folder: Input
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        kw_only=True,
        description="fraction of images to hold out if there is no test split",
    )

    @cached_property
    @abstractmethod
    def _listing(self) -> Listing:
        """The image files and the files that are not read."""

    @property
    @abstractmethod
    def _labels(self) -> str:
        """The file or folder that defines the classes, for messages."""

    def _in_order(self, names: set[str]) -> list[str]:
        """Return the names of the classes in the order of the class list."""
        return sorted(names)

    def _listing_parameters(self) -> dict[str, Any]:
        """Return parameters that identify the listed images and the packing options."""
        listing = hashlib.sha256()
        for file in self._listing.files:
            size = (self.folder / file.path).stat().st_size
            listing.update(repr((*file, size)).encode())
        return {
            "folder": self.folder.resolve().name,
            "listing": listing.hexdigest()[:16],
            "short_side": self.target_side,
            "quality": self.quality,
            "test_fraction": self.test_fraction,
            "skip_bad": self.skip_bad,
        }

    def splits(self) -> dict[str, Sequence[ListedTask]]:
        files = self._listing.files
        label = {name: i for i, name in enumerate(self._class_names)}
        splits: dict[str, list[ListedTask]] = {"train": []}
        by_hash = _split_by_hash(files, self.test_fraction)
        keys = webdataset_keys(file.path for file in files)
        for file, split, key in zip(files, by_hash, keys, strict=True):
            task = ListedTask(file.path, label[file.class_name], key)
            splits.setdefault(split, []).append(task)
        return {split: tasks for split, tasks in splits.items() if tasks}

    def render(self, task: ListedTask) -> Sample | Skipped:
        path = self.folder / task.path
        try:
            image = self.packed(path.read_bytes())
        except ValueError as error:
            if self.skip_bad:
                return Skipped(task.path, str(error))
            raise ValueError(f"{path}: {error}: remove the file, or pass --skip-bad") from error
        return Sample(task.key, image.data, image.extension, task.label, image.repaired)

    def example(self, task: ListedTask) -> str:
        return task.path

    @property
    def origin(self) -> InputPath:
        return self.folder

    def skipped(self) -> list[Skipped]:
        """Return the files and folders that are not read."""
        return self._listing.skipped

    def notes(self) -> list[str]:
        """Return one line for each reason why files were skipped."""
        return by_reason(self.skipped())

    @cached_property
    def _class_names(self) -> list[str]:
        files = self._listing.files
        names = self._in_order({file.class_name for file in files})
        if len(names) < 2:
            found = "1 class" if names else "no class"
            raise ValueError(
                f"{self._labels} contains {found} with images "
                f"({', '.join(sorted(ENDINGS))}): at least 2 are required"
            )
        trained = {file.class_name for file in files if file.split in (None, "train")}
        if untrained := [name for name in names if name not in trained]:
            raise ValueError(
                f"class {untrained[0]!r} has test images, but none in {self.folder / 'train'}: add "
                "some, or remove the class"
            )
        return names


def path_attribute(above: Sequence[str]) -> dict[str, str]:
    """Return the `path` attribute of a class below the nodes `above`, or nothing without nodes."""
    return {PATH: join_path(above)} if above else {}


def _split_by_hash(files: Sequence[File], test_fraction: float) -> list[str]:
    """Assign each file to a split by a hash of its path.

    In each class, the image with the largest hash is always in the training split.
    """
    hashes = [
        int.from_bytes(hashlib.sha256(file.path.encode("utf-8", "surrogateescape")).digest()[:8])
        for file in files
    ]
    kept: defaultdict[str, int] = defaultdict(int)
    for file, value in zip(files, hashes, strict=True):
        kept[file.class_name] = max(kept[file.class_name], value)
    return [
        file.split
        or ("test" if value < test_fraction * 2**64 and value < kept[file.class_name] else "train")
        for file, value in zip(files, hashes, strict=True)
    ]


def classes_digest(classes: Sequence[ClassInfo]) -> str:
    """Return 16 hexadecimal digits for the names of the classes, their order and attributes."""
    content = repr([info.model_dump() for info in classes]).encode()
    return hashlib.sha256(content).hexdigest()[:16]
