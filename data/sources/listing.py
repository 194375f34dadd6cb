"""Which files are pictures of which class: by class folders, or by a label file.

Nothing is opened but the label file: whether a file is a picture shows later.
"""

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from data.shards.split_names import SPLIT_OF_WORD, TRAIN, shard_splits, split_name
from data.skipped import Skipped

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"})
_SPLITS = frozenset(SPLIT_OF_WORD.values())
NOT_AN_IMAGE = f"its name does not end in {', '.join(sorted(ENDINGS))}"
_SHOWN = 60


class File(NamedTuple):
    """`path` is inside the folder; `split` None: by hash."""

    path: str
    class_name: str
    split: str | None


@dataclass
class Listing:
    """`files` in order of path; `skipped`: files and folders that are not read, which is no error.

    above: class -> the folders above its own, where class folders are nested.
    """

    files: list[File] = field(default_factory=list)
    above: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, paths: Iterable[Path], root: Path, reason: str) -> None:
        """Note `paths` below `root` as skipped."""
        self.skipped += [Skipped(str(path.relative_to(root)), reason) for path in paths]


def why_not_file(path: Path) -> str:
    """What a directory entry is that is neither a file nor a folder."""
    return "broken symbolic link" if path.is_symlink() else "not a regular file"


def list_class_folders(folder: Path, *, nested: bool = False) -> Listing:
    """Pictures in class folders, which stand in `folder` or in split folders in it.

    nested: a picture's class is the folder that it lies in, however deep; else the topmost.

    Raises ValueError for folders that look like splits and are not, for two folders of one split,
    for a split without images, for a class name that is not UTF-8, and for nested folders of one
    name.
    """
    listing = Listing()
    splits = _split_folders(folder)
    if not splits:
        _refuse_split_names(folder)
        _add_tree(listing, folder, folder, None, nested)
    for name, split in splits.items():
        _add_tree(listing, folder, folder / name, split, nested)
        if not any(file.path.startswith(f"{name}/") for file in listing.files):
            raise ValueError(
                f"{folder / name} has no pictures in class folders: add some, or remove it"
            )
    if splits:
        others = [found for found in _folders(folder) if found.name not in splits]
        listing.skip(others, folder, "folder beside train/ that is not a split")
    listing.files.sort()
    listing.skipped.sort()
    return listing


def _split_folders(folder: Path) -> dict[str, str]:
    """Sub-folder -> split, where `folder` contains `train/` and something to evaluate on."""
    found: dict[str, list[str]] = {}
    for path in _folders(folder):
        if (split := split_name(path.name)) in _SPLITS:
            found.setdefault(split, []).append(path.name)
    if TRAIN not in found or len(found) == 1:
        return {}
    for split, names in found.items():
        if len(names) > 1:
            raise ValueError(
                f"{folder} has {names[0]}/ and {names[1]}/, both of them split {split}: remove one"
            )
    in_shards = shard_splits(found)
    return {name: in_shards[split] for split, (name,) in found.items()}


def _refuse_split_names(folder: Path) -> None:
    """A class may be called train; a folder of that name with folders in it is a split."""
    folders = _folders(folder)
    alike = [f for f in folders if split_name(f.name) in _SPLITS]
    for found in alike:
        if len(alike) == len(folders) or _folders(found):
            raise ValueError(
                f"{found} looks like a split, not like a class: splits are train/ with test/ or "
                "val/ beside it; rename it, or move its class folders up"
            )


def _folders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def _add_tree(listing: Listing, root: Path, part: Path, split: str | None, nested: bool) -> None:
    for class_folder in _folders(part):
        _check_name(class_folder)
        before = len(listing.files)
        for parent, folders, names in os.walk(class_folder):
            links = [Path(parent, name) for name in folders if os.path.islink(Path(parent, name))]
            listing.skip(links, root, "link to a folder below a class folder")
            images = _images(listing, root, [Path(parent, name) for name in names])
            if images:
                name = _nested_class(listing, part, Path(parent)) if nested else class_folder.name
                found = (path.relative_to(root).as_posix() for path in images)
                listing.files += [File(path, name, split) for path in found]
        if len(listing.files) == before:
            listing.skip([class_folder], root, "class folder without images")
    loose = [path for path in part.iterdir() if path.suffix.lower() in ENDINGS]
    listing.skip([path for path in loose if not path.is_dir()], root, "outside the class folders")


def _images(listing: Listing, root: Path, paths: Iterable[Path]) -> list[Path]:
    """Those of `paths` that are images; the listing notes the others."""
    images = []
    for path in paths:
        if path.suffix.lower() not in ENDINGS:
            listing.skip([path], root, NOT_AN_IMAGE)
        elif not path.is_file():
            listing.skip([path], root, why_not_file(path))
        else:
            images.append(path)
    return images


def _nested_class(listing: Listing, part: Path, class_folder: Path) -> str:
    """The name of a folder in `part`; what is above it goes into the listing."""
    _check_name(class_folder)
    *above, name = class_folder.relative_to(part).parts
    if (other := listing.above.setdefault(name, tuple(above))) != tuple(above):
        raise ValueError(
            f"{part} has two class folders {name!r}, {Path(*other, name)} and "
            f"{Path(*above, name)}: rename one"
        )
    return name


def _check_name(class_folder: Path) -> None:
    try:
        class_folder.name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{class_folder.parent}: the name of class folder {class_folder.name!r} is not UTF-8: "
            "rename it"
        ) from error


def list_label_file(folder: Path, labels: Path) -> Listing:
    """Lines `file,class` of a label file; a first line that says just that is skipped.

    Raises ValueError or FileNotFoundError with the line.
    """
    seen: dict[str, int] = {}
    listing = Listing()
    root = os.path.abspath(folder)
    for line, row in _rows(labels):
        where = f"{labels}, line {line}"
        if len(row) != 2 or not all(cell.strip() for cell in row):
            raise ValueError(f"{where}: {_cut(','.join(row))} is not file,class: correct it")
        # By its name alone: a picture may be a link to one elsewhere.
        name = os.path.relpath(os.path.join(root, row[0].strip()), root)
        if name.split(os.sep)[0] == os.pardir:
            raise ValueError(f"{where}: {_cut(row[0])} is outside {folder}: name files inside it")
        if name in seen:
            raise ValueError(
                f"{where}: {_cut(row[0])} is listed before, in line {seen[name]}: keep one of them"
            )
        if not Path(root, name).is_file():
            raise FileNotFoundError(
                f"{where}: {_cut(name)} is missing in {folder}: add it or remove the line"
            )
        seen[name] = line
        listing.files.append(File(name, row[1].strip(), None))
    listing.files.sort()
    return listing


def _rows(labels: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, cells) of each row, less empty ones and the heading."""
    with labels.open("rb") as file:
        reader = csv.reader(_lines(file, labels))
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(
                    f"{labels}, line {line}: {error}: is a quote left open there?"
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
                f"{labels}, line {number}: not UTF-8 text: save the file as UTF-8"
            ) from error


def _cut(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
