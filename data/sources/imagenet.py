"""ImageNet as published for ILSVRC 2012, read from the tar files in place.

The training tar contains a tar for each class, and the validation images are labeled by the devkit
(`ilsvrc_devkit.py`). To list the images, only tar headers are read.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.messages import Report, silent
from data.option import Argument, Supplied
from data.skipped import Skipped
from data.sources.ilsvrc_devkit import DEVKIT, Devkit, read_devkit
from data.sources.input_files import (
    HIDDEN_FILE,
    NOT_AN_IMAGE,
    Input,
    check_folder,
    is_image_name,
    read_range,
)
from data.sources.packing import PackedImages, webdataset_keys
from data.sources.source import STRICT, Sample, Source
from data.tars.headers import Fault, Member, walk

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_SYNSET = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"_(\d{8})$")
_THREADS = 8  # the threads mostly wait for the disk


class _Image(NamedTuple):
    """An image: bytes [offset, offset + size) of the tar `file`. `name` is unique."""

    name: str
    file: str
    offset: int
    size: int
    synset: str


class _Task(NamedTuple):
    key: str
    image: _Image
    label: int


@dataclass(frozen=True, config=STRICT)
class ImageNet(PackedImages, Source):
    """ImageNet (ILSVRC 2012), from the published tar files.

    The devkit contains the names of the classes and the labels of the validation images. The
    classes are those of the training images, sorted by synset ID. Use `imagefolder` for extracted
    class folders.
    """

    kind = "imagenet"
    modality = "image"
    reads = "the ILSVRC 2012 tars and devkit (a 144 GB download, registration required)"
    held_out = "the validation images"

    folder: Annotated[
        Input,
        Argument(),
        Field(description=f"folder that contains {TRAIN_TAR} and {VAL_TAR}"),
    ]
    devkit: Input | None = Field(
        default=None,
        description=f"path of {DEVKIT}.tar.gz or of its extracted folder; by "
        "default, FOLDER is searched",
    )
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_folder(self.folder, f"pass the folder that contains {TRAIN_TAR}")

    def parameters(self) -> dict[str, Any]:
        listing = hashlib.sha256(repr([info.model_dump() for info in self.classes()]).encode())
        for split, images in self._splits.items():
            for image in images:
                listing.update(repr((split, image.name, image.size, image.synset)).encode())
        return {
            "listing": listing.hexdigest()[:16],
            "short_side": self.target_side,
            "quality": self.quality,
            "skip_bad": self.skip_bad,
        }

    def classes(self) -> tuple[ClassInfo, ...]:
        about = self._devkit.attributes(self._synsets)
        return tuple(
            ClassInfo(name=synset, attributes=attributes)
            for synset, attributes in zip(self._synsets, about, strict=True)
        )

    def splits(self) -> dict[str, Sequence[_Task]]:
        label = {synset: i for i, synset in enumerate(self._synsets)}
        return {
            split: [
                _Task(key, image, label[image.synset])
                for key, image in zip(webdataset_keys(p.name for p in found), found, strict=True)
            ]
            for split, found in self._splits.items()
        }

    def render(self, task: _Task) -> Sample | Skipped:
        path, image = self.folder / task.image.file, task.image
        return self.image_sample(
            task.key,
            task.label,
            lambda: read_range(path, image.offset, image.size),
            name=f"{image.file}: {task.key}",
            where=f"{path}: {task.key}",
            fix="download it again, or pass --skip-bad",
        )

    def notes(self) -> list[str]:
        missing = f"there is no test split, because {VAL_TAR} is missing"
        return [missing] if self._validation is None else []

    def skipped(self) -> list[Skipped]:
        """Return the files and images that are not read."""
        reason = "validation image of a class that is not in training"
        trained = set(self._synsets)
        others = [image for image in self._validation or () if image.synset not in trained]
        return self._ignored + [Skipped(f"{one.file}: {one.name}", reason) for one in others]

    @cached_property
    def _devkit(self) -> Devkit:
        published = [self.folder / DEVKIT, self.folder / f"{DEVKIT}.tar.gz"]
        return read_devkit(self.devkit or next(filter(Path.exists, published), published[-1]))

    @cached_property
    def _ignored(self) -> list[Skipped]:
        return []  # listing the images fills it

    @cached_property
    def _training(self) -> list[_Image]:
        """The images of the tar of each class, sorted by name. Only tar headers are read."""
        tar = self.folder / TRAIN_TAR
        if not tar.is_file():
            raise FileNotFoundError(
                f"{self.folder} does not contain {TRAIN_TAR}: pass the folder that contains it, or "
                "read extracted class folders with kway shard imagefolder"
            )
        classes = {PurePosixPath(m.name).name.removesuffix(".tar"): m for m in tar_members(tar)}
        synsets = sorted(classes)
        for synset in synsets:
            if not _SYNSET.fullmatch(synset):
                raise ValueError(
                    f"{tar} contains {synset!r}, which is not a synset ID such as n01440764: "
                    "remove it, or extract the tars and use kway shard imagefolder"
                )
        images: list[_Image] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            listings = pool.map(lambda synset: tar_members(tar, classes[synset]), synsets)
            for done, (synset, members) in enumerate(zip(synsets, listings, strict=True), start=1):
                found = list(self._images(tar, synset, members))
                if not found:
                    raise ValueError(f"{tar}: class {synset} is empty: add images, or remove it")
                images += found
                self.report(done, len(synsets))
        return images

    @cached_property
    def _validation(self) -> list[_Image] | None:
        """The validation images, or None without their tar. Their names contain only a number,
        which the devkit maps to a class.
        """
        tar = self.folder / VAL_TAR
        if not tar.is_file():
            return None
        images, truth = [], self._devkit.truth
        for image in self._images(tar, "val", tar_members(tar)):
            number = _NUMBER.search(PurePosixPath(image.name).stem)
            position = int(number[1]) if number else 0
            if not 1 <= position <= len(truth):
                raise ValueError(
                    f"{tar}: {self._devkit.path} has labels for validation images 1 to "
                    f"{len(truth):,}, but not for {image.name}: remove the image, or pass another "
                    "devkit"
                )
            images.append(image._replace(synset=truth[position - 1]))
        return images

    def _images(self, tar: Path, folder: str, members: Iterable[Member]) -> Iterator[_Image]:
        """Yield the images among the members of a tar, sorted by name. The others are skipped."""
        for name, one in sorted((PurePosixPath(one.name).name, one) for one in members):
            if is_image_name(name):
                yield _Image(f"{folder}/{name}", tar.name, one.offset, one.size, folder)
            else:
                reason = HIDDEN_FILE if name.startswith(".") else NOT_AN_IMAGE
                self._ignored.append(Skipped(f"{tar.name}: {folder}/{one.name}", reason))

    @cached_property
    def _synsets(self) -> list[str]:
        synsets = sorted({image.synset for image in self._training})
        if len(synsets) < 2:
            raise ValueError(
                f"{self.folder} has {len(synsets)} classes of training images: at least 2 are "
                "required"
            )
        if other := [synset for synset in synsets if synset not in self._devkit.synsets]:
            raise ValueError(
                f"{self.folder} contains class {other[0]}, which is not in the devkit: pass the "
                "matching devkit, or remove the class"
            )
        return synsets

    @cached_property
    def _splits(self) -> dict[str, list[_Image]]:
        trained = set(self._synsets)
        test = [image for image in self._validation or () if image.synset in trained]
        return {"train": self._training, **({"test": test} if test else {})}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "report": silent}


def tar_members(path: Path, inside: Member | None = None) -> list[Member]:
    """Return, in order, the files in the tar `path`, or in the tar `inside` that it contains.

    This reads 512 bytes per member. Raises ValueError, with the tar, the position and a fix, for a
    damaged header, a truncated tar, or a member that is neither a file nor a folder.
    """
    where, region = str(path), (0, path.stat().st_size)
    if inside is not None:
        where, region = f"{path}: {inside.name}", (inside.offset, inside.offset + inside.size)
    members: dict[str, Member] = {}
    with path.open("rb", buffering=0) as file:
        for found in walk(file, *region):
            if isinstance(found, Fault):
                what = f"at byte {found.offset:,}: {found.what}"
                raise ValueError(f"{where}: {what}: download the tar again")
            if members.setdefault(found.name, found) is not found:
                raise ValueError(f"{where}: it contains {found.name} twice: download the tar again")
    return list(members.values())
