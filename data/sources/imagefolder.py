"""A folder with one subfolder of images per class, in the folder itself or in its split folders."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.files import is_hidden, walk_directory
from data.option import Argument, Option
from data.shards.split_names import (
    SPLIT_OF_WORD,
    TEST,
    TRAIN,
    checked_split,
    shard_splits,
    split_in_name,
    split_name,
)
from data.skipped import Skipped
from data.sources.input_files import (
    ENDINGS,
    HIDDEN_FOLDER,
    Input,
    check_folder,
    not_file,
    why_not_image,
)
from data.sources.names import class_name, spelling_notes
from data.sources.packing import PackedImages, webdataset_keys
from data.sources.source import STRICT, HeldOutByHash, Sample

_SPLITS = frozenset(SPLIT_OF_WORD.values())


class File(NamedTuple):
    """An image file. path: its path relative to the folder. split: its split in the shards, or None
    if the split is chosen by a hash.
    """

    path: str
    class_name: str
    split: str | None


class _Task(NamedTuple):
    path: str
    label: int
    key: str


@dataclass(frozen=True, config=STRICT)
class ImageFolder(PackedImages, HeldOutByHash):
    """A folder with one subfolder of images per class.

    The class folders are in the folder itself or in subfolders that are named after splits, such as
    `train/` and `test/` or `val/`. State other names of split folders with --split.
    """

    kind = "imagefolder"
    modality = "image"
    reads = "class folders of images"
    held_out = (
        "test/, val/ and similar, or --test-fraction of the images, chosen by a hash of their paths"
    )

    folder: Annotated[
        Input,
        Argument(),
        Field(description="folder that contains the class folders, or train/ and test/"),
    ]
    split: Annotated[dict[str, str], Option(metavar="NAME=SUBFOLDER")] = Field(
        default_factory=dict,
        description="subfolder that contains the class folders of a split, such as "
        "train=cars_train; can be repeated; the other subfolders are not read",
    )
    has_splits: Annotated[bool, Option("--no-splits", flag=False)] = Field(
        default=True, description="every subfolder is a class, even if its name is that of a split"
    )

    def __post_init__(self) -> None:
        check_folder(self.folder, "pass a folder that contains class folders")
        splits = [checked_split(name) for name in self.split]
        if self.split and not self.has_splits:
            raise ValueError("imagefolder: pass either --split or --no-splits")
        if self.split and TRAIN not in splits:
            raise ValueError("imagefolder: pass the training images as --split train=SUBFOLDER")
        if twice := next((name for name in splits if splits.count(name) > 1), None):
            raise ValueError(f"imagefolder: --split: split {twice} is given twice")
        for path in self.split.values():
            check_folder(self.folder / path, "pass a subfolder as --split NAME=SUBFOLDER")

    def parameters(self) -> dict[str, Any]:
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
            "labels": None,  # an option of earlier versions, whose shards are still resumed
        }

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(ClassInfo(name=name) for name in self._class_names)

    def splits(self) -> dict[str, Sequence[_Task]]:
        files = self._listing.files
        label = {name: i for i, name in enumerate(self._class_names)}
        paths = [file.path.encode("utf-8", "surrogateescape") for file in files]
        hashes = [int.from_bytes(hashlib.sha256(path).digest()[:8]) for path in paths]
        # In each class, the image with the largest hash is always in the training split.
        largest: defaultdict[str, int] = defaultdict(int)
        for file, value in zip(files, hashes, strict=True):
            largest[file.class_name] = max(largest[file.class_name], value)
        splits: dict[str, list[_Task]] = {TRAIN: []}
        keys = webdataset_keys(file.path for file in files)
        for file, value, key in zip(files, hashes, keys, strict=True):
            held_out = value < self.test_fraction * 2**64 and value < largest[file.class_name]
            split = file.split or (TEST if held_out else TRAIN)
            splits.setdefault(split, []).append(_Task(file.path, label[file.class_name], key))
        return {split: tasks for split, tasks in splits.items() if tasks}

    def render(self, task: _Task) -> Sample | Skipped:
        path, fix = self.folder / task.path, "remove the file, or pass --skip-bad"
        return self.image_sample(
            task.key, task.label, path.read_bytes, name=task.path, where=path, fix=fix
        )

    def without_splits(self) -> str | None:
        return None if self._split_folders else "there are no split folders"

    def skipped(self) -> list[Skipped]:
        return self._listing.skipped

    def notes(self) -> list[str]:
        return spelling_notes(self._listing.spellings, self._class_names)

    @cached_property
    def _class_names(self) -> list[str]:
        files = self._listing.files
        names = sorted({file.class_name for file in files})
        if len(names) < 2:
            found = "1 class" if names else "no class"
            raise ValueError(
                f"{self.folder} contains {found} with images "
                f"({', '.join(sorted(ENDINGS))}): at least 2 are required"
            )
        trained = {file.class_name for file in files if file.split in (None, TRAIN)}
        if untrained := [name for name in names if name not in trained]:
            raise ValueError(
                f"{self.folder}: class {untrained[0]!r} has test images, but none in the training "
                "split: add some, or remove the class"
            )
        return names

    @cached_property
    def _split_folders(self) -> dict[str, str]:
        """Map subfolders to splits, or to nothing if the folder itself has the class folders.

        Raises ValueError for folders that look like splits without --split or --no-splits.
        """
        if self.split or not self.has_splits:
            return {path: split_name(name) for name, path in self.split.items()}
        folders = _folders(self.folder)
        found = {path.name: split_name(path.name) for path in folders}
        found = {name: split for name, split in found.items() if split in _SPLITS}
        # Two folders for one split, such as val/ and dev/, are an error below.
        if TRAIN in found.values() and len(found) == len(set(found.values())) > 1:
            return found
        # A class may be named `bullet train`, but a folder with this name that contains folders is
        # a split.
        similar = [path for path in folders if split_in_name(path.name) is not None]
        for path in similar:
            if len(similar) == len(folders) or _folders(path):
                stated = [f"--split {split_in_name(one.name)}={one.name}" for one in similar]
                raise ValueError(
                    f"{path} looks like a split, not a class: pass the splits as NAME=SUBFOLDER "
                    f"({' '.join(stated[:3])}), or --no-splits if the subfolders are classes; if "
                    "they do not contain class folders, write a table (docs/layouts.md)"
                )
        return {}

    @cached_property
    def _listing(self) -> "_Listing":
        listing = _Listing(self.folder)
        parts = self._split_folders
        if not parts:
            listing.add_classes(self.folder, None)
        in_shards = shard_splits(parts.values())
        for part, split in parts.items():
            if not listing.add_classes(self.folder / part, in_shards[split]):
                raise ValueError(
                    f"{self.folder / part} has no classes: add class folders, or pass the splits "
                    "that have them, such as --split train=train; if a file lists its labels, "
                    "write a table (docs/layouts.md)"
                )
        used = {part.split("/")[0] for part in parts}
        for path in self.folder.iterdir() if parts else ():
            if path.name not in used:
                is_folder = path.is_dir() and not is_hidden(path.name)
                why = "folder next to train/ that is not a split"
                listing.skip(path, why if is_folder else _why_not_class(path))
        listing.files.sort()
        listing.skipped.sort()
        return listing


class _Listing:
    """Image files below `root`. spellings: the folder names of each class. skipped: the files and
    folders that are not read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[File] = []
        self.spellings: defaultdict[str, set[str]] = defaultdict(set)
        self.skipped: list[Skipped] = []

    def skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(str(path.relative_to(self.root)), reason))

    def add_classes(self, base: Path, split: str | None) -> bool:
        """Add the images of each class folder in `base`. Return whether there are any.

        Raises ValueError for a class folder with several subfolders of images, because these may be
        the classes, and for a name that is not UTF-8.
        """
        before = len(self.files)
        for path in sorted(base.iterdir()):
            if not path.is_dir() or is_hidden(path.name):
                self.skip(path, _why_not_class(path))
            elif not (folders := self._add_class(path, split)):
                self.skip(path, "class folder without images")
            elif len(below := sorted(folders - {"."})) > 1:
                raise ValueError(
                    f"{path} has images in several subfolders, such as {below[0]} and {below[1]}: "
                    "if these are the classes, move them up, or write a table with one row per "
                    "image (docs/layouts.md)"
                )
            elif path.name.encode(errors="replace").decode() != path.name:
                raise ValueError(
                    f"{self.root}: the name of class folder {path.name!r} is not UTF-8: rename it"
                )
        return len(self.files) > before

    def _add_class(self, class_folder: Path, split: str | None) -> set[str]:
        """Add the images below a folder. Return the subfolders that contain them."""
        name, with_images = class_name(class_folder.name), set()
        for parent, folders, files in walk_directory(class_folder):
            for path in [parent / one for one in folders]:
                if path.is_symlink() or is_hidden(path.name):
                    link = "link to a folder below a class folder"
                    self.skip(path, link if path.is_symlink() else HIDDEN_FOLDER)
                    folders.remove(path.name)
            for path in [parent / one for one in files]:
                if (reason := why_not_image(path)) is not None:
                    self.skip(path, reason)
                    continue
                self.files.append(File(path.relative_to(self.root).as_posix(), name, split))
                self.spellings[name].add(class_folder.name)
                with_images.add(str(parent.relative_to(class_folder)))
        return with_images


def _why_not_class(path: Path) -> str:
    """Return the reason to skip an entry next to the class folders. A broken link may represent a
    class.
    """
    if path.is_dir():
        return HIDDEN_FOLDER
    return "outside the class folders" if path.is_file() else not_file(path)


def _folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not is_hidden(f.name))
