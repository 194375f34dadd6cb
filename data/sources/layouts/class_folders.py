"""Lists the image files of each class from class folders.

Image files are not opened here; they are validated later. `label_files.py` lists the images in
label files.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from data.files import is_hidden, walk_directory
from data.messages import pluralize
from data.remote.input_path import InputPath
from data.shards.split_names import SPLIT_OF_WORD, TRAIN, shard_splits, split_name
from data.skipped import Skipped

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
_SPLITS = frozenset(SPLIT_OF_WORD.values())
NOT_AN_IMAGE = f"its name does not end in {', '.join(sorted(ENDINGS))}"
_HIDDEN_FOLDER = "hidden folder"
_UNLISTED = "no label or annotation file lists it"
LEAF, PATH = "leaf", "path"
CLASS_FROM = r"^(leaf|path|-?[1-9][0-9]?)$"
_LABEL_ENDINGS = (".txt", ".csv", ".tsv")


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

    folders: a map from each class to the names of the folders on its path, if the class is not
    the topmost folder and has a single path. skipped: the files and folders that are ignored
    without an error.
    """

    files: list[File] = field(default_factory=list)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, paths: Iterable[InputPath], root: InputPath, reason: str) -> None:
        """Record `paths` below `root` as skipped."""
        self.skipped += [Skipped(str(path.relative_to(root)), reason) for path in paths]

    def skip_outside(self, folder: InputPath, root: InputPath) -> None:
        """Record the entries of `folder` that are not class or split folders as skipped."""
        for path, reason in entries_outside_class_folders(folder):
            self.skip([path], root, reason)

    def skip_unlisted(self, root: InputPath, listed: Container[str]) -> None:
        """Record the images below `root` that are neither `listed` nor skipped yet.

        Hidden folders and folders that are skipped as a whole are not searched.
        """
        known = {one.name for one in self.skipped}
        for parent, folders, names in walk_directory(root):
            at = "" if parent == root else f"{parent.relative_to(root)}/"
            folders[:] = [f for f in folders if not is_hidden(f) and f"{at}{f}" not in known]
            paths = (f"{at}{name}" for name in names if _is_image_name(name))
            found = (path for path in paths if path not in listed and path not in known)
            self.skipped += [Skipped(path, _UNLISTED) for path in found]


def why_not_file(path: InputPath) -> str:
    """Return the reason to skip a directory entry that is neither a file nor a folder."""
    return "broken symbolic link" if path.is_symlink() else "not a regular file"


def entries_outside_class_folders(folder: InputPath) -> Iterator[tuple[InputPath, str]]:
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


def list_class_folders(
    folder: InputPath, *, class_from: str | None = None, labeled: Collection[str] = ()
) -> Listing:
    """List the images in class folders, which are in `folder` itself or in its split folders.

    class_from: the folders that define the class of an image. "leaf": the folder that contains the
    image, by its name, or by its path if several such folders have the same name. "path": the same
    folder, always by its path. A number: the name of the n-th folder below `folder` or below the
    split, or the n-th from the end if it is negative. labeled: the canonical names of the splits
    that label files describe. These are not listed, and other held-out splits are skipped unless
    their class folders are those of the training split.

    The splits in the result have their canonical names if there are `labeled` splits, otherwise
    their names in the shards.

    Raises ValueError for class folders that look like splits, for two folders that represent the
    same split, for a held-out split without class folders, for a class name that is not UTF-8 and,
    if `class_from` is None, for a class folder with two or more subfolders of images, which is
    ambiguous.
    """
    listing = Listing()
    if TRAIN in labeled:
        return listing
    splits = _split_folders(folder, labeled)
    if splits:
        directories = _of_splits(listing, folder, splits, labeled)
    elif labeled:
        raise ValueError(
            f"{folder} does not contain a folder train/ with class folders: add it, or pass the "
            f"labels of all splits ({TRAIN}=FILE)"
        )
    else:
        _reject_split_names(folder)
        directories = _directories(listing, folder, folder, None)
    if class_from is None:
        _reject_ambiguous_levels(folder, directories)
    class_of = _class_names({directory.folders for directory in directories}, class_from or "1")
    for name in class_of.values():
        _check_name(folder, name)
    if class_from not in (None, "1"):
        listing.folders = _single_paths(class_of, class_from)
    in_shards = (
        {name: name for name in splits.values()} if labeled else shard_splits(splits.values())
    )
    for directory in directories:
        if (class_name := class_of.get(directory.folders)) is None:
            reason = f"it has too few folders above it for --class-from {class_from}"
            listing.skipped += [Skipped(path, reason) for path in directory.images]
            continue
        split = directory.split and in_shards[directory.split]
        listing.files += [File(path, class_name, split) for path in directory.images]
    listing.files.sort()
    listing.skipped.sort()
    return listing


def _of_splits(
    listing: Listing, folder: InputPath, splits: dict[str, str], labeled: Collection[str]
) -> list[_Directory]:
    """Return the directories with images in the split folders. Held-out splits without labels are
    skipped if there are `labeled` splits; otherwise they are an error.
    """
    directories = []
    trained: set[str] = set()
    # The training split comes first, because the others are compared with its classes. Splits with
    # a label file come next, so that an error can name the file.
    order = sorted(splits, key=lambda name: (splits[name] != TRAIN, not _label_file(folder / name)))
    for name in order:
        split = splits[name]
        if split in labeled:
            continue
        unread = Listing()
        found = _directories(unread, folder, folder / name, split)
        classes = {directory.folders[0] for directory in found}
        if split == TRAIN:
            trained = classes
        elif not classes & trained:
            if not labeled and len(classes) == 1:
                raise ValueError(_without_classes(folder, name, classes))
            if labeled:
                reason = "held-out split without labels, and its folders are not classes of train/"
                listing.skip([folder / name], folder, reason)
                continue
        if not found:
            raise ValueError(_without_classes(folder, name, classes))
        directories += found
        listing.skipped += unread.skipped
    others = [found for found in _folders(folder) if found.name not in splits]
    listing.skip(others, folder, "folder next to train/ that is not a split")
    listing.skip_outside(folder, folder)
    return directories


def _without_classes(folder: InputPath, name: str, classes: Collection[str]) -> str:
    """Return the error for a split folder whose images are not in folders of training classes."""
    where = f"{folder / name} does not contain class folders with images: add some"
    if classes:
        where = (
            f"{folder / name}: class {min(classes)!r} has test images, but none in train/: add "
            "some, remove the class"
        )
    labels = _label_file(folder / name) or "FILE"
    return f"{where}, remove this folder, or pass its labels as --split-labels {name}={labels}"


def _label_file(folder: InputPath) -> InputPath | None:
    """Return a file in a split folder that may contain its labels, such as val_annotations.txt."""
    files = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in _LABEL_ENDINGS)
    return next((path for path in files if path.is_file()), None)


def _class_names(
    folders: Collection[tuple[str, ...]], class_from: str
) -> dict[tuple[str, ...], str]:
    """Map each of `folders` to the class of its images. Those with too few folders are omitted."""
    if class_from == PATH:
        return {path: "/".join(path) for path in folders}
    if class_from == LEAF:
        repeated = {name for name, n in Counter(path[-1] for path in folders).items() if n > 1}
        return {path: "/".join(path) if path[-1] in repeated else path[-1] for path in folders}
    number = int(class_from)
    at = number - 1 if number > 0 else number
    return {path: path[at] for path in folders if len(path) >= abs(number)}


def _single_paths(
    class_of: dict[tuple[str, ...], str], class_from: str
) -> dict[str, tuple[str, ...]]:
    """Map each class that has a single path to the names of the folders on it."""
    paths = defaultdict(set)
    for folders, name in class_of.items():
        end = len(folders)
        if class_from not in (LEAF, PATH):
            end = int(class_from) if int(class_from) > 0 else end + int(class_from) + 1
        paths[name].add(folders[:end])
    return {name: found.pop() for name, found in paths.items() if len(found) == 1}


def _reject_ambiguous_levels(folder: InputPath, directories: Iterable[_Directory]) -> None:
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
        f"{folder} has images at several folder levels ({'; '.join(levels)}): pass "
        f"--class-from path for one class per folder with images ({len(images):,}), such as "
        f"{example!r}, or --class-from 1 for one class per topmost folder ({topmost:,})"
    )


def _split_folders(folder: InputPath, labeled: Collection[str]) -> dict[str, str]:
    """Map subfolders to splits. The result is empty unless `folder` contains `train/` and a
    held-out split.
    """
    found: dict[str, list[str]] = {}
    for path in _folders(folder):
        if (split := split_name(path.name)) in _SPLITS:
            found.setdefault(split, []).append(path.name)
    if TRAIN not in found or (len(found) == 1 and not labeled):
        return {}
    for split, names in found.items():
        if len(names) > 1 and split not in labeled:
            raise ValueError(
                f"{folder} has both {names[0]}/ and {names[1]}/ for split {split}: remove one"
            )
    return {name: split for split, names in found.items() for name in names}


def _reject_split_names(folder: InputPath) -> None:
    """Raise ValueError for a folder that looks like a split.

    A class may be named train, but a folder with this name that contains folders is a split.
    """
    folders = _folders(folder)
    split_like = [f for f in folders if split_name(f.name) in _SPLITS]
    for found in split_like:
        if len(split_like) == len(folders) or _folders(found):
            raise ValueError(
                f"{found} looks like a split, not a class, but splits require train/ and test/ or "
                "val/: add the missing split, rename the folder, move its class folders up, or "
                "pass a file with the labels of each split as --split-labels NAME=FILE"
            )


def _folders(folder: InputPath) -> list[InputPath]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not is_hidden(f.name))


def _directories(
    listing: Listing, root: InputPath, part: InputPath, split: str | None
) -> list[_Directory]:
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


def _skip_folders(listing: Listing, root: InputPath, parent: InputPath, folders: list[str]) -> None:
    """Remove links and hidden folders from `folders`, so that `os.walk` does not enter them."""
    paths = [parent / name for name in folders]
    links = [path for path in paths if path.is_symlink()]
    hidden = [path for path in paths if is_hidden(path.name) and path not in links]
    listing.skip(links, root, "link to a folder below a class folder")
    listing.skip(hidden, root, _HIDDEN_FOLDER)
    skipped = {path.name for path in [*links, *hidden]}
    folders[:] = [name for name in folders if name not in skipped]


def _images(listing: Listing, root: InputPath, paths: Iterable[InputPath]) -> list[InputPath]:
    """Return the `paths` that are images, and record the others as skipped."""
    images = []
    for path in paths:
        if not _is_image_name(path.name):
            listing.skip([path], root, NOT_AN_IMAGE)
        elif not path.is_file():
            listing.skip([path], root, why_not_file(path))
        else:
            images.append(path)
    return images


def _is_image_name(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in ENDINGS


def _check_name(folder: InputPath, class_name: str) -> None:
    try:
        class_name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{folder}: the name of class folder {class_name!r} is not UTF-8: rename it"
        ) from error
