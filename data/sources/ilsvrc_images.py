"""Lists the images of ILSVRC 2012 in the published tars or in the extracted folders.

Only tar headers are read; the images are validated later. This module raises an error for a bad
header, a truncated tar or a missing end marker. Python's tarfile would silently stop there and omit
the images that follow.
"""

import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from data.files import is_hidden
from data.messages import Report, silent
from data.remote.input_path import InputPath
from data.remote.path import RemotePath
from data.skipped import Skipped
from data.sources.ilsvrc_devkit import DEVKIT, Devkit
from data.sources.image_files import (
    HIDDEN_FILE,
    NOT_AN_IMAGE,
    entries_outside_class_folders,
    is_image_name,
    why_not_file,
)
from data.tars.headers import BLOCK, Member

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_SYNSET = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"_(\d{8})$")
_THREADS = 8  # the threads mostly wait for the disk
_FILE_TYPES = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE)


class ImageEntry(NamedTuple):
    """An image: bytes [offset, offset + size) of `file`, a path in the folder. `name` is unique."""

    name: str
    file: str
    offset: int
    size: int
    synset: str


@dataclass
class ImageList:
    """The images, sorted by name. The list is the same for tars and folders. skipped: the other
    files.
    """

    found: list[ImageEntry] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def list_training(folder: InputPath, report: Report = silent) -> ImageList:
    """List the images in ILSVRC2012_img_train.tar or train/.

    Raises ValueError for a class that is not a synset ID. `report(done, total)` counts classes.
    """
    tar = folder / TRAIN_TAR
    if tar.is_file():
        classes = {PurePosixPath(m.name).name.removesuffix(".tar"): m for m in tar_members(tar)}

        def members(synset: str) -> list[Member]:
            return tar_members(tar, classes[synset])

        return _of_classes(tar, classes, members, tar.name, report)
    train = folder / "train"
    if not train.is_dir():
        raise FileNotFoundError(
            f"{folder} has neither {TRAIN_TAR} nor train/: pass the folder that contains them"
        )
    return _of_folders(train, report)


def list_validation(folder: InputPath, devkit: Devkit | None) -> ImageList | None:
    """List the images in ILSVRC2012_img_val.tar or val/, which may be flat. Returns None if neither
    exists.

    In a flat folder, images are identified only by a number, which the devkit maps to a class.
    Raises ValueError if the devkit is required but missing.
    """
    tar, val = folder / VAL_TAR, folder / "val"
    if tar.is_file():
        return _flat(tar, tar_members(tar), devkit, tar.name)
    if not val.is_dir():
        return None
    if _folders(val):
        listed = _of_folders(val)
        listed.found = _renamed(listed.found)
        return listed
    return _flat(val, _files(val, ""), devkit, None)


def _folders(folder: InputPath) -> list[str]:
    return [f.name for f in folder.iterdir() if f.is_dir() and not is_hidden(f.name)]


def _files(folder: InputPath, synset: str) -> list[Member | Skipped]:
    """Return the files of a class folder by relative path, and the other entries as skipped."""
    if isinstance(folder, RemotePath):
        return [_file(folder, synset, entry) for entry in (folder / synset).iterdir()]
    with os.scandir(str(folder / synset)) as entries:
        return [_file(folder, synset, entry) for entry in entries]


def _file(folder: InputPath, synset: str, entry: os.DirEntry[str] | RemotePath) -> Member | Skipped:
    if entry.is_file():
        return Member(str(PurePosixPath(synset, entry.name)), 0, entry.stat().st_size)
    reason = (
        "folder in a class folder" if entry.is_dir() else why_not_file(folder / synset / entry.name)
    )
    return Skipped(str(Path(folder.name, synset, entry.name)), reason)


def _of_folders(folder: InputPath, report: Report = silent) -> ImageList:
    """Return the images of the class folders in `folder`."""
    listed = _of_classes(folder, _folders(folder), partial(_files, folder), None, report)
    listed.skipped += [
        Skipped(str(Path(folder.name, path.name)), reason)
        for path, reason in sorted(entries_outside_class_folders(folder))
    ]
    return listed


def _of_classes(
    where: InputPath,
    classes: Iterable[str],
    members: Callable[[str], Sequence[Member | Skipped]],
    tar: str | None,
    report: Report = silent,
) -> ImageList:
    """Return the images of class folders, or of the class tars in `tar`."""
    synsets = sorted(classes)
    for synset in synsets:
        if not _SYNSET.fullmatch(synset):
            raise ValueError(
                f"{where} contains {synset!r}, which is not a synset ID such as n01440764: remove "
                "it, or use kway shard imagefolder"
            )
    listed = ImageList()
    with ThreadPoolExecutor(_THREADS) as pool:
        listings = zip(synsets, pool.map(members, synsets), strict=True)
        for done, (synset, found) in enumerate(listings, start=1):
            images = _image_members(listed, found, f"{tar}: {synset}/" if tar else f"{where.name}/")
            if not images:
                raise ValueError(f"{where}: class {synset} is empty: add images, or remove it")
            for name, member in images:
                file = tar or f"{where.name}/{member.name}"
                image = ImageEntry(f"{synset}/{name}", file, member.offset, member.size, synset)
                listed.found.append(image)
            report(done, len(synsets))
    return listed


def _flat(
    where: InputPath, members: Sequence[Member | Skipped], devkit: Devkit | None, tar: str | None
) -> ImageList:
    if devkit is None:
        raise ValueError(
            f"{where} does not contain labels: copy {DEVKIT}.tar.gz to the same folder, or pass "
            "its path with --devkit"
        )
    listed = ImageList()
    for name, member in _image_members(listed, members, f"{tar}: " if tar else f"{where.name}/"):
        number = _NUMBER.search(PurePosixPath(name).stem)
        position = int(number[1]) if number else 0
        if not 1 <= position <= len(devkit.truth):
            raise ValueError(
                f"{where}: {devkit.path} has labels for validation images 1 to "
                f"{len(devkit.truth):,}, but not for {name}: remove the image, or pass another "
                "devkit"
            )
        file = tar or f"{where.name}/{name}"
        synset = devkit.truth[position - 1]
        listed.found.append(ImageEntry(f"val/{name}", file, member.offset, member.size, synset))
    return listed


def _renamed(images: list[ImageEntry]) -> list[ImageEntry]:
    """Rename images as if `val/` were flat, if the names remain unique, and sort them by name."""
    flat = [image.name.rpartition("/")[2] for image in images]
    names = flat if len(set(flat)) == len(flat) else [image.name for image in images]
    return sorted(p._replace(name=f"val/{name}") for p, name in zip(images, names, strict=True))


def _image_members(
    listed: ImageList, members: Iterable[Member | Skipped], prefix: str
) -> list[tuple[str, Member]]:
    """Return (file name, member) of the images among `members`, and record the others as skipped.

    prefix: a prefix for the skipped names.
    """
    images = []
    for member in sorted(members):
        name = PurePosixPath(member.name).name
        if isinstance(member, Skipped):
            listed.skipped.append(member)
        elif name.startswith("."):
            listed.skipped.append(Skipped(f"{prefix}{member.name}", HIDDEN_FILE))
        elif not is_image_name(name):
            listed.skipped.append(Skipped(f"{prefix}{member.name}", NOT_AN_IMAGE))
        else:
            images.append((name, member))
    return sorted(images)


def tar_members(path: InputPath, inside: Member | None = None) -> list[Member]:
    """Return, in order, the files in the tar `path`, or in the tar `inside` that it contains.

    This reads 512 bytes per member. Raises ValueError, with the tar, the position and a fix, for a
    damaged header, a truncated tar, or a member that is neither a file nor a folder.
    """
    with path.open("rb", buffering=0) as file:
        start, size = 0, path.stat().st_size
        where = str(path)
        if inside is not None:
            where, start, size = f"{path}: {inside.name}", inside.offset, inside.size
        try:
            members = list(_members(file, start, start + size))
            _check_names(members)
        except ValueError as error:
            raise ValueError(f"{where}: {error}: download the tar again") from error
    return members


def _members(file: IO[bytes], at: int, stop: int) -> Iterator[Member]:
    while True:
        header = _read(file, min(BLOCK, stop - at), at)
        if len(header) < BLOCK:
            raise ValueError(f"it is truncated at byte {at:,}: the end marker is missing")
        if header == bytes(BLOCK):
            _check_rest(file, at, stop)
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise ValueError(f"the header at byte {at:,} is damaged ({error})") from error
        at += BLOCK
        if at + info.size > stop:
            raise ValueError(f"it is truncated inside {info.name}, at byte {stop:,}")
        if info.type in _FILE_TYPES:
            yield Member(info.name, at, info.size)
        elif info.type in _PAX_TYPES:
            _check_pax(_read(file, info.size, at), info.name)
        elif info.type != tarfile.DIRTYPE:
            raise ValueError(f"{info.name} has tar type {info.type!r} and is not a regular file")
        at += -(-info.size // BLOCK) * BLOCK


def _read(file: IO[bytes], size: int, at: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _check_names(members: list[Member]) -> None:
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            raise ValueError(f"it contains {member.name} twice")
        seen.add(member.name)


def _check_rest(file: IO[bytes], at: int, stop: int) -> None:
    """Raise ValueError unless only zero padding follows the end marker.

    Members after the end marker would not be read.
    """
    while at < stop:
        chunk = _read(file, min(1 << 20, stop - at), at)
        if not chunk or chunk.count(0) != len(chunk):
            raise ValueError(f"data follows the end marker at byte {at:,}")
        at += len(chunk)


def _check_pax(records: bytes, name: str) -> None:
    """Raise ValueError for a pax header with a name or size. Other pax fields are ignored."""
    if b" path=" in records or b" size=" in records:
        raise ValueError(f"{name} is a pax header with a name or size, which is not supported")
