"""Lists the image files of each class, from class folders or a label file.

Image files are not opened here; they are validated later.
"""

import csv
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from data.files import is_hidden, walk_directory
from data.messages import pluralize
from data.shards.split_names import SPLIT_OF_WORD, TRAIN, shard_splits, split_name
from data.skipped import Skipped

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
_SPLITS = frozenset(SPLIT_OF_WORD.values())
NOT_AN_IMAGE = f"its name does not end in {', '.join(sorted(ENDINGS))}"
_HIDDEN_FOLDER = "hidden folder"
_SHOWN = 60


class File(NamedTuple):
    """An image file. path: its path relative to the folder. split: its split, or None if the split
    is chosen by a hash.
    """

    path: str
    class_name: str
    split: str | None


@dataclass
class Listing:
    """Image files sorted by path.

    folders: a map from each class to the names of the folders on its path, for nested class
    folders. skipped: the files and folders that are ignored without an error.
    """

    files: list[File] = field(default_factory=list)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, paths: Iterable[Path], root: Path, reason: str) -> None:
        """Record `paths` below `root` as skipped."""
        self.skipped += [Skipped(str(path.relative_to(root)), reason) for path in paths]

    def skip_outside(self, folder: Path, root: Path) -> None:
        """Record the entries of `folder` that are not class or split folders as skipped."""
        for path, reason in entries_outside_class_folders(folder):
            self.skip([path], root, reason)


def why_not_file(path: Path) -> str:
    """Return the reason to skip a directory entry that is neither a file nor a folder."""
    return "broken symbolic link" if path.is_symlink() else "not a regular file"


def entries_outside_class_folders(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the entries of `folder` that are not class folders, each with the reason why it is not
    read.

    A broken link among them may represent a class.
    """
    for path in folder.iterdir():
        if not path.is_dir():
            yield path, "outside the class folders" if path.is_file() else why_not_file(path)
        elif is_hidden(path.name):
            yield path, _HIDDEN_FOLDER


class _Directory(NamedTuple):
    """A directory with images: the folders on its path below the split, and the image paths."""

    folders: tuple[str, ...]
    split: str | None
    images: list[str]


def list_class_folders(folder: Path, *, nested: bool | None = None) -> Listing:
    """List the images in class folders, which are in `folder` itself or in its split folders.

    nested: whether the class of an image is the folder that contains it, at any depth, instead of
    the topmost folder. If several folders have the same name, their paths become the class names.

    Raises ValueError for class folders that look like splits, for two folders that represent the
    same split, for a split without images, for a class name that is not UTF-8 and, if `nested` is
    None, for a class folder with two or more subfolders of images, which is ambiguous.
    """
    listing = Listing()
    splits = _split_folders(folder)
    if not splits:
        _reject_split_names(folder)
        directories = _directories(listing, folder, folder, None)
    else:
        directories = []
        for name, split in splits.items():
            found = _directories(listing, folder, folder / name, split)
            if not found:
                raise ValueError(
                    f"{folder / name} does not contain class folders with images: add some, or "
                    "remove this folder"
                )
            directories += found
        others = [found for found in _folders(folder) if found.name not in splits]
        listing.skip(others, folder, "folder next to train/ that is not a split")
        listing.skip_outside(folder, folder)
    if nested is None:
        _reject_ambiguous_levels(folder, directories)
    class_of = _class_names({directory.folders for directory in directories}, nested=bool(nested))
    for name in class_of.values():
        _check_name(folder, name)
    if nested:
        listing.folders = {name: folders for folders, name in class_of.items()}
    for directory in directories:
        name = class_of[directory.folders]
        listing.files += [File(path, name, directory.split) for path in directory.images]
    listing.files.sort()
    listing.skipped.sort()
    return listing


def _class_names(
    folders: Collection[tuple[str, ...]], *, nested: bool
) -> dict[tuple[str, ...], str]:
    """Map each of `folders` to the class of its images."""
    if not nested:
        return {path: path[0] for path in folders}
    repeated = {name for name, n in Counter(path[-1] for path in folders).items() if n > 1}
    return {path: "/".join(path) if path[-1] in repeated else path[-1] for path in folders}


def _reject_ambiguous_levels(folder: Path, directories: Iterable[_Directory]) -> None:
    """Raise ValueError, with the folders and images per level, if the classes are ambiguous."""
    images = Counter[tuple[str, ...]]()
    for directory in directories:
        images[directory.folders] += len(directory.images)
    below = Counter(path[0] for path in images if len(path) > 1)
    if not any(number > 1 for number in below.values()):
        return
    deepest = max(len(path) for path in images)
    levels = []
    for level in range(1, deepest + 1):
        here = pluralize(len({path[:level] for path in images if len(path) >= level}), "folder")
        found = pluralize(sum(n for path, n in images.items() if len(path) == level), "image")
        levels.append(f"level {level}: {here} with {found}")
    topmost = len({path[0] for path in images})
    example = "/".join(min(path for path in images if len(path) == deepest))
    raise ValueError(
        f"{folder} has images at several folder levels ({'; '.join(levels)}): pass --nested "
        f"for one class per folder with images ({len(images):,}), such as {example!r}, or "
        f"--topmost for one class per topmost folder ({topmost:,})"
    )


def _split_folders(folder: Path) -> dict[str, str]:
    """Map subfolders to splits. The result is empty unless `folder` contains `train/` and a
    held-out split.
    """
    found: dict[str, list[str]] = {}
    for path in _folders(folder):
        if (split := split_name(path.name)) in _SPLITS:
            found.setdefault(split, []).append(path.name)
    if TRAIN not in found or len(found) == 1:
        return {}
    for split, names in found.items():
        if len(names) > 1:
            raise ValueError(
                f"{folder} has both {names[0]}/ and {names[1]}/ for split {split}: remove one"
            )
    in_shards = shard_splits(found)
    return {name: in_shards[split] for split, (name,) in found.items()}


def _reject_split_names(folder: Path) -> None:
    """Raise ValueError for a folder that looks like a split.

    A class may be named train, but a folder with this name that contains folders is a split.
    """
    folders = _folders(folder)
    split_like = [f for f in folders if split_name(f.name) in _SPLITS]
    for found in split_like:
        if len(split_like) == len(folders) or _folders(found):
            raise ValueError(
                f"{found} looks like a split, not a class, but splits require train/ and test/ or "
                "val/: add the missing split, rename the folder, or move its class folders up"
            )


def _folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not is_hidden(f.name))


def _directories(listing: Listing, root: Path, part: Path, split: str | None) -> list[_Directory]:
    """Return the directories with images in the class folders of `part`."""
    found: list[_Directory] = []
    for class_folder in _folders(part):
        before = len(found)
        for parent, folders, names in walk_directory(class_folder):
            _skip_folders(listing, root, parent, folders)
            if images := _images(listing, root, [parent / name for name in names]):
                paths = [path.relative_to(root).as_posix() for path in images]
                found.append(_Directory(parent.relative_to(part).parts, split, paths))
        if len(found) == before:
            listing.skip([class_folder], root, "class folder without images")
    listing.skip_outside(part, root)
    return found


def _skip_folders(listing: Listing, root: Path, parent: Path, folders: list[str]) -> None:
    """Remove links and hidden folders from `folders`, so that `os.walk` does not enter them."""
    paths = [parent / name for name in folders]
    links = [path for path in paths if path.is_symlink()]
    hidden = [path for path in paths if is_hidden(path.name) and path not in links]
    listing.skip(links, root, "link to a folder below a class folder")
    listing.skip(hidden, root, _HIDDEN_FOLDER)
    skipped = {path.name for path in [*links, *hidden]}
    folders[:] = [name for name in folders if name not in skipped]


def _images(listing: Listing, root: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the `paths` that are images, and record the others as skipped."""
    images = []
    for path in paths:
        if path.suffix.lower() not in ENDINGS:
            listing.skip([path], root, NOT_AN_IMAGE)
        elif not path.is_file():
            listing.skip([path], root, why_not_file(path))
        else:
            images.append(path)
    return images


def _check_name(folder: Path, class_name: str) -> None:
    try:
        class_name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{folder}: the name of class folder {class_name!r} is not UTF-8: rename it"
        ) from error


def list_label_file(folder: Path, labels: Path) -> Listing:
    """List the lines `file,class` of a label file. A header line `file,class` is skipped.

    Raises ValueError or FileNotFoundError, with the line number.
    """
    seen: dict[str, int] = {}
    listing = Listing()
    root = os.path.abspath(folder)
    for line, row in _rows(labels):
        where = f"{labels}, line {line}"
        if len(row) != 2 or not all(cell.strip() for cell in row):
            raise ValueError(
                f"{where}: {_cut(','.join(row))} is not of the form file,class: correct it"
            )
        # Links are not resolved, because an image may be a link to a file outside the folder.
        name = os.path.relpath(os.path.join(root, row[0].strip()), root)
        if name.split(os.sep)[0] == os.pardir:
            raise ValueError(f"{where}: {_cut(row[0])} is outside {folder}: use files inside it")
        if name in seen:
            raise ValueError(
                f"{where}: {_cut(row[0])} is already listed on line {seen[name]}: remove one line"
            )
        if not Path(root, name).is_file():
            raise FileNotFoundError(
                f"{where}: {_cut(name)} is missing from {folder}: add it, or remove the line"
            )
        seen[name] = line
        listing.files.append(File(name, row[1].strip(), None))
    listing.files.sort()
    return listing


def _rows(labels: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, cells) for each row, except empty rows and the header."""
    with labels.open("rb") as file:
        reader = csv.reader(_lines(file, labels))
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(
                    f"{labels}, line {line}: {error}: check for an unclosed quote"
                ) from error
            if row is None:
                return
            if row and (line, row) != (1, ["file", "class"]):
                yield line, row


def _lines(file: IO[bytes], labels: Path) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{labels}, line {number} is not UTF-8 text: save the file as UTF-8"
            ) from error


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
