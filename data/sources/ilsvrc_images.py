"""Lists the images of ILSVRC 2012 in the published tars.

Only tar headers are read; the images are validated later. A bad header, a truncated tar or a
missing end marker is an error.
"""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from data.messages import Report, silent
from data.remote.input_path import InputPath
from data.skipped import Skipped
from data.sources.ilsvrc_devkit import DEVKIT, Devkit
from data.sources.image_files import (
    HIDDEN_FILE,
    NOT_AN_IMAGE,
    is_image_name,
)
from data.tars.headers import Fault, Member, walk

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_SYNSET = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"_(\d{8})$")
_THREADS = 8  # the threads mostly wait for the disk


class ImageEntry(NamedTuple):
    """An image: bytes [offset, offset + size) of the tar `file`. `name` is unique."""

    name: str
    file: str
    offset: int
    size: int
    synset: str


@dataclass
class ImageList:
    """The images, sorted by name. skipped: the other files."""

    found: list[ImageEntry] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def list_training(folder: InputPath, report: Report = silent) -> ImageList:
    """List the images in ILSVRC2012_img_train.tar, which contains a tar for each class.

    Raises ValueError for a class that is not a synset ID. `report(done, total)` counts classes.
    """
    tar = folder / TRAIN_TAR
    if not tar.is_file():
        raise FileNotFoundError(
            f"{folder} does not contain {TRAIN_TAR}: pass the folder that contains it, or read "
            "extracted class folders with kway shard imagefolder"
        )
    classes = {PurePosixPath(m.name).name.removesuffix(".tar"): m for m in tar_members(tar)}
    synsets = sorted(classes)
    for synset in synsets:
        if not _SYNSET.fullmatch(synset):
            raise ValueError(
                f"{tar} contains {synset!r}, which is not a synset ID such as n01440764: remove "
                "it, or extract the tars and use kway shard imagefolder"
            )
    listed = ImageList()
    with ThreadPoolExecutor(_THREADS) as pool:
        listings = pool.map(lambda synset: tar_members(tar, classes[synset]), synsets)
        for done, (synset, found) in enumerate(zip(synsets, listings, strict=True), start=1):
            images = _image_members(listed, found, f"{tar.name}: {synset}/")
            if not images:
                raise ValueError(f"{tar}: class {synset} is empty: add images, or remove it")
            listed.found += [
                ImageEntry(f"{synset}/{name}", tar.name, one.offset, one.size, synset)
                for name, one in images
            ]
            report(done, len(synsets))
    return listed


def list_validation(folder: InputPath, devkit: Devkit | None) -> ImageList | None:
    """List the images in ILSVRC2012_img_val.tar. Returns None if it does not exist.

    The images are identified only by a number, which the devkit maps to a class. Raises ValueError
    if it is missing.
    """
    tar = folder / VAL_TAR
    if not tar.is_file():
        return None
    if devkit is None:
        raise ValueError(
            f"{tar} does not contain labels: copy {DEVKIT}.tar.gz to the same folder, or pass "
            "its path with --devkit"
        )
    listed = ImageList()
    for name, one in _image_members(listed, tar_members(tar), f"{tar.name}: "):
        number = _NUMBER.search(PurePosixPath(name).stem)
        position = int(number[1]) if number else 0
        if not 1 <= position <= len(devkit.truth):
            raise ValueError(
                f"{tar}: {devkit.path} has labels for validation images 1 to "
                f"{len(devkit.truth):,}, but not for {name}: remove the image, or pass another "
                "devkit"
            )
        synset = devkit.truth[position - 1]
        listed.found.append(ImageEntry(f"val/{name}", tar.name, one.offset, one.size, synset))
    return listed


def _image_members(
    listed: ImageList, members: Iterable[Member], prefix: str
) -> list[tuple[str, Member]]:
    """Return (file name, member) of the images among `members`, and record the others as skipped.

    prefix: a prefix for the skipped names.
    """
    images = []
    for member in members:
        name = PurePosixPath(member.name).name
        if is_image_name(name):
            images.append((name, member))
        else:
            reason = HIDDEN_FILE if name.startswith(".") else NOT_AN_IMAGE
            listed.skipped.append(Skipped(f"{prefix}{member.name}", reason))
    return sorted(images)


def tar_members(path: InputPath, inside: Member | None = None) -> list[Member]:
    """Return, in order, the files in the tar `path`, or in the tar `inside` that it contains.

    This reads 512 bytes per member. Raises ValueError, with the tar, the position and a fix, for a
    damaged header, a truncated tar, or a member that is neither a file nor a folder.
    """
    where, region = str(path), (0, path.stat().st_size)
    if inside is not None:
        where, region = f"{path}: {inside.name}", (inside.offset, inside.offset + inside.size)
    members = []
    with path.open("rb", buffering=0) as file:
        for found in walk(file, *region):
            if isinstance(found, Fault):
                what = f"at byte {found.offset:,}: {found.what}"
                raise ValueError(f"{where}: {what}: download the tar again")
            members.append(found)
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            raise ValueError(f"{where}: it contains {member.name} twice: download the tar again")
        seen.add(member.name)
    return members
