"""ImageNet as published for ILSVRC 2012: tar files read in place, or the extracted folders.

Where pictures lie is `ilsvrc_listing.py`, what synsets mean `ilsvrc_devkit.py`.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from data.images import MAX_PIXELS
from data.manifest import ClassInfo, SourceInfo
from data.sources.ilsvrc_devkit import DEVKIT, Devkit, read_devkit
from data.sources.ilsvrc_listing import (
    TRAIN_TAR,
    VAL_TAR,
    Picture,
    Pictures,
    list_training,
    list_validation,
)
from data.sources.keys import webdataset_keys
from data.sources.packing import check_packing, packed
from data.sources.source import Sample

_NAMED = 3


class _Task(NamedTuple):
    key: str
    file: str
    offset: int
    size: int
    label: int


@dataclass(frozen=True)
class ImageNet:
    """The source `imagenet`; its validation pictures become the split "test".

    `folder` holds ILSVRC2012_img_train.tar or train/, and ILSVRC2012_img_val.tar or val/ (flat, or
    class folders); the tars count where both are there. devkit: the archive or its folder; by
    default it is looked for in `folder`. It names the classes and is needed for a flat val.
    Classes are those of training, in the order of their synset ids. The other parameters are
    those of `ImageFolder`.
    """

    folder: Path
    devkit: Path | None = None
    short_side: int | None = 256
    quality: int = 90
    skip_bad: bool = False
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder} is no folder: name the one with {TRAIN_TAR} or train/"
            )
        check_packing("imagenet", self.short_side, self.quality)

    def describe(self) -> SourceInfo:
        # Neither folder nor layout: extracted pictures give the same shards as the tars.
        listing = hashlib.sha256(repr([info.model_dump() for info in self.classes()]).encode())
        for split, pictures in self._splits.items():
            for picture in pictures:
                listing.update(repr((split, picture.name, picture.size, picture.synset)).encode())
        parameters: dict[str, Any] = {
            "listing": listing.hexdigest()[:16],
            "short_side": self.short_side,
            "quality": self.quality,
            "skip_bad": self.skip_bad,
        }
        return SourceInfo(kind="imagenet", parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        devkit = self._devkit
        return tuple(
            ClassInfo(name=synset, attributes={} if devkit is None else devkit.attributes(synset))
            for synset in self._synsets
        )

    def label_vectors(self) -> None:
        return None

    def splits(self) -> dict[str, Sequence[_Task]]:
        label = {synset: i for i, synset in enumerate(self._synsets)}
        return {
            split: [
                _Task(key, p.file, p.offset, p.size, label[p.synset])
                for key, p in zip(webdataset_keys(p.name for p in found), found, strict=True)
            ]
            for split, found in self._splits.items()
        }

    def render(self, task: _Task) -> Sample | None:
        path = self.folder / task.file
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), task.size, task.offset)
        try:
            if len(data) != task.size:
                raise ValueError(f"it has {len(data)} of the {task.size} bytes that were listed")
            data, extension = packed(
                data, short_side=self.short_side, quality=self.quality, max_pixels=self.max_pixels
            )
        except ValueError as error:
            if self.skip_bad:
                return None
            where = f"{path}, {task.key} in it" if path.suffix == ".tar" else str(path)
            raise ValueError(f"{where}: {error}; download it again, or give --skip-bad") from error
        return Sample(task.key, data, extension, task.label)

    def notes(self) -> list[str]:
        """What is missing or left out without being an error, one line each."""
        notes = []
        for tar, folder in ((TRAIN_TAR, "train"), (VAL_TAR, "val")):
            if (self.folder / tar).is_file() and (self.folder / folder).is_dir():
                notes.append(f"ignoring {folder}/: {tar} is there")
        if self._devkit is None:
            notes.append(f"no {DEVKIT}.tar.gz: classes have no words and no parents")
        else:
            notes += _missing(self._devkit, self._training, self._validation)
        if self._validation is None:
            notes.append(f"neither {VAL_TAR} nor val/: there is no test split")
        ignored = self._training.ignored + (self._validation.ignored if self._validation else 0)
        if ignored:
            notes.append(f"ignoring {ignored:,} files whose name does not end like a picture's")
        if outside := self._num_outside:
            notes.append(f"ignoring {outside:,} validation pictures of classes not in training")
        return notes

    @cached_property
    def _devkit(self) -> Devkit | None:
        if self.devkit is not None:
            return read_devkit(self.devkit)
        for name in (f"{DEVKIT}.tar.gz", DEVKIT):
            if (self.folder / name).exists():
                return read_devkit(self.folder / name)
        return None

    @cached_property
    def _training(self) -> Pictures:
        return list_training(self.folder)

    @cached_property
    def _validation(self) -> Pictures | None:
        return list_validation(self.folder, self._devkit)

    @cached_property
    def _synsets(self) -> list[str]:
        synsets = sorted({picture.synset for picture in self._training.found})
        if len(synsets) < 2:
            raise ValueError(
                f"{self.folder} has {len(synsets)} classes of training pictures: 2 are needed"
            )
        if self._devkit is not None:
            for synset in synsets:
                if synset not in self._devkit.synsets:
                    raise ValueError(
                        f"{self.folder} has class {synset}, which {self._devkit.path} does not "
                        "know: give its own devkit, or remove the class"
                    )
        return synsets

    @cached_property
    def _splits(self) -> dict[str, list[Picture]]:
        trained = set(self._synsets)
        test = self._validation.found if self._validation else []
        splits = {
            "train": self._training.found,
            "test": [picture for picture in test if picture.synset in trained],
        }
        return {split: pictures for split, pictures in splits.items() if pictures}

    @property
    def _num_outside(self) -> int:
        listed = len(self._validation.found) if self._validation else 0
        return listed - len(self._splits.get("test", []))

    def __getstate__(self) -> dict[str, Any]:
        # Workers read; they need no listing.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}


def _missing(devkit: Devkit, training: Pictures, validation: Pictures | None) -> list[str]:
    """What the devkit counts and is not there: a subset, or a loss."""
    found = Counter(picture.synset for picture in training.found)
    expected = {s.wnid: s.pictures for s in devkit.synsets.values() if s.pictures}
    notes = []
    if absent := sorted(expected.keys() - found.keys()):
        notes.append(
            f"training has {len(found):,} of the devkit's {len(expected):,} classes: "
            f"without {_some(absent)}"
        )
    if other := sorted(s for s in expected.keys() & found.keys() if found[s] != expected[s]):
        counts = [f"{s} has {found[s]:,} pictures and not {expected[s]:,}" for s in other]
        notes.append(f"training differs from the devkit in {len(other):,} classes: {_some(counts)}")
    if validation is not None and len(validation.found) != len(devkit.truth):
        notes.append(
            f"validation has {len(validation.found):,} of the devkit's {len(devkit.truth):,} "
            "pictures"
        )
    return notes


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
