"""A folder with one subfolder of images per class, or a folder of images with a label file.

Images that are larger than needed are resized and stored as JPEG. The bytes of all other images are
stored unchanged.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.option import Argument, Option
from data.shards.hierarchy import PATH, join_path
from data.shards.manifest import ClassInfo, SourceInfo
from data.skipped import Skipped, by_reason
from data.sources.layouts.class_folders import (
    ENDINGS,
    File,
    Listing,
    list_class_folders,
    list_label_file,
)
from data.sources.layouts.taxonomy import ClassTaxonomy, TaxonomyOption
from data.sources.packing import PackedImages, webdataset_keys
from data.sources.source import STRICT, CommandSource, Sample


class _Task(NamedTuple):
    path: str
    label: int
    key: str


@dataclass(frozen=True, config=STRICT)
class ImageFolder(PackedImages, CommandSource):
    """A folder with one subfolder of images per class.

    The class folders are in the folder itself or in subfolders that are named after splits, such as
    `train/` and `test/` or `val/` (see docs/data.md).
    """

    kind = "imagefolder"
    modality = "image"
    reads = "class folders of images, or the images that --labels lists"
    held_out = (
        "test/, val/ and similar, or --test-fraction of the images, chosen by a hash of their paths"
    )
    compares_splits = True

    folder: Annotated[
        Path,
        Argument(),
        Field(description="folder that contains the class folders, or train/ and test/"),
    ]
    labels: Path | None = Field(
        default=None,
        description="CSV file with one line `file,class` per image, used instead of class folders",
    )
    nested: Annotated[bool | None, Option("--nested/--topmost")] = Field(
        default=None,
        description="class of an image in nested folders: the folder that contains the image, with "
        "the folders above it as the hierarchy, or the topmost folder",
    )
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="fraction of images to hold out if there is no test split",
    )
    taxonomy: TaxonomyOption = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder} is not a folder: pass a folder that contains class folders"
            )
        if self.nested is not None and self.labels is not None:
            raise ValueError(
                f"imagefolder: --labels {self.labels} defines the classes: omit --nested and "
                "--topmost"
            )
        if self.nested and self.taxonomy is not None:
            raise ValueError("imagefolder: --nested defines the hierarchy: omit --wordnet")

    def describe(self) -> SourceInfo:
        listing = hashlib.sha256()
        for file in self._files:
            size = (self.folder / file.path).stat().st_size
            listing.update(repr((*file, size)).encode())
        parameters: dict[str, Any] = {
            "folder": self.folder.resolve().name,
            "listing": listing.hexdigest()[:16],
            "labels": self.labels.name if self.labels else None,
            "short_side": self.target_side,
            "quality": self.quality,
            "test_fraction": self.test_fraction,
            "skip_bad": self.skip_bad,
        }
        if self.nested:
            parameters["nested"] = True
        if self.taxonomy is not None:
            content = repr([info.model_dump() for info in self.classes()]).encode()
            parameters["taxonomy"] = hashlib.sha256(content).hexdigest()[:16]
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        names = self._class_names
        if (in_taxonomy := self._in_taxonomy) is not None:
            attributes = in_taxonomy.attributes()
        else:
            attributes = [_path(folders) for folders in self._folders_above()]
        return tuple(
            ClassInfo(name=name, attributes=about)
            for name, about in zip(names, attributes, strict=True)
        )

    def _folders_above(self) -> list[tuple[str, ...]]:
        """Return the folders above each class.

        The folder of the class itself is included if it also contains other classes.
        """
        paths = [self._listing.folders.get(name, (name,)) for name in self._class_names]
        inner = {path[:length] for path in paths for length in range(1, len(path))}
        return [path if path in inner else path[:-1] for path in paths]

    def splits(self) -> dict[str, Sequence[_Task]]:
        label = {name: i for i, name in enumerate(self._class_names)}
        splits: dict[str, list[_Task]] = {"train": []}
        by_hash = _split_by_hash(self._files, self.test_fraction)
        keys = webdataset_keys(file.path for file in self._files)
        for file, split, key in zip(self._files, by_hash, keys, strict=True):
            task = _Task(file.path, label[file.class_name], key)
            splits.setdefault(split, []).append(task)
        return {split: tasks for split, tasks in splits.items() if tasks}

    def render(self, task: _Task) -> Sample | Skipped:
        path = self.folder / task.path
        try:
            image = self.packed(path.read_bytes())
        except ValueError as error:
            if self.skip_bad:
                return Skipped(task.path, str(error))
            raise ValueError(f"{path}: {error}: remove the file, or pass --skip-bad") from error
        return Sample(task.key, image.data, image.extension, task.label, image.repaired)

    @property
    def origin(self) -> Path:
        return self.folder

    def skipped(self) -> list[Skipped]:
        """Return the files and folders that are not read."""
        return self._listing.skipped

    def notes(self) -> list[str]:
        """Return one line for each reason why files were skipped, and one for each choice that was
        made.
        """
        notes = by_reason(self.skipped())
        if (in_taxonomy := self._in_taxonomy) is not None:
            notes += in_taxonomy.notes()
        return notes

    @cached_property
    def _in_taxonomy(self) -> ClassTaxonomy | None:
        if self.taxonomy is None:
            return None
        return ClassTaxonomy(self.taxonomy, self._class_names)

    @property
    def _files(self) -> list[File]:
        return self._listing.files

    @cached_property
    def _listing(self) -> Listing:
        if self.labels is not None:
            return list_label_file(self.folder, self.labels)
        return list_class_folders(self.folder, nested=self.nested)

    @cached_property
    def _class_names(self) -> list[str]:
        names = sorted({file.class_name for file in self._files})
        if len(names) < 2:
            found = "1 class" if names else "no class"
            raise ValueError(
                f"{self.labels or self.folder} contains {found} with images "
                f"({', '.join(sorted(ENDINGS))}): at least 2 are required"
            )
        trained = {file.class_name for file in self._files if file.split in (None, "train")}
        if untrained := [name for name in names if name not in trained]:
            raise ValueError(
                f"class {untrained[0]!r} has test images, but none in {self.folder / 'train'}: add "
                "some, or remove the class"
            )
        return names

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "taxonomy": None}


def _path(above: tuple[str, ...]) -> dict[str, str]:
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
