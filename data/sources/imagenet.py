"""ImageNet as published for ILSVRC 2012, read from the tar files in place.

`ilsvrc_images.py` lists the images, and `ilsvrc_devkit.py` reads the synsets.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, silent
from data.option import Argument, Supplied
from data.remote.input_path import Input, InputPath, check_folder, read_range
from data.shards.manifest import ClassInfo, SourceInfo
from data.skipped import Skipped, by_reason
from data.sources.ilsvrc_devkit import DEVKIT, Devkit, read_devkit
from data.sources.ilsvrc_images import (
    TRAIN_TAR,
    VAL_TAR,
    ImageEntry,
    ImageList,
    list_training,
    list_validation,
)
from data.sources.packing import PackedImages, webdataset_keys
from data.sources.source import STRICT, CommandSource, Sample
from data.sources.taxonomy import ClassTaxonomy, TaxonomyOption

_NAMED = 3


class _Task(NamedTuple):
    key: str
    file: str
    offset: int
    size: int
    label: int


@dataclass(frozen=True, config=STRICT)
class ImageNet(PackedImages, CommandSource):
    """ImageNet (ILSVRC 2012), from the published tar files.

    The devkit contains the names of the classes and the labels of the validation images. The
    classes are those of the training images, sorted by synset ID. Use `imagefolder` for extracted
    class folders.
    """

    kind = "imagenet"
    modality = "image"
    reads = "the ILSVRC 2012 tars and devkit (a 144 GB download, registration required)"
    held_out = "the validation images"
    compares_splits = True

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
    taxonomy: TaxonomyOption = field(default=None, compare=False, repr=False)
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_folder(self.folder, f"pass the folder that contains {TRAIN_TAR}")

    def describe(self) -> SourceInfo:
        listing = hashlib.sha256(repr([info.model_dump() for info in self.classes()]).encode())
        for split, images in self._splits.items():
            for image in images:
                listing.update(repr((split, image.name, image.size, image.synset)).encode())
        parameters: dict[str, Any] = {
            "listing": listing.hexdigest()[:16],
            "short_side": self.target_side,
            "quality": self.quality,
            "skip_bad": self.skip_bad,
        }
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        return tuple(
            ClassInfo(name=synset, attributes=about)
            for synset, about in zip(self._synsets, self._attributes(), strict=True)
        )

    def _attributes(self) -> list[dict[str, str]]:
        if (in_taxonomy := self._in_taxonomy) is None:
            return [{} for _ in self._synsets]
        attributes = in_taxonomy.attributes()
        if (devkit := self._devkit) is not None:
            for synset, about in zip(self._synsets, attributes, strict=True):
                about["gloss"] = devkit.synsets[synset].gloss
        return attributes

    def splits(self) -> dict[str, Sequence[_Task]]:
        label = {synset: i for i, synset in enumerate(self._synsets)}
        return {
            split: [
                _Task(key, p.file, p.offset, p.size, label[p.synset])
                for key, p in zip(webdataset_keys(p.name for p in found), found, strict=True)
            ]
            for split, found in self._splits.items()
        }

    def render(self, task: _Task) -> Sample | Skipped:
        path = self.folder / task.file
        data = read_range(path, task.offset, task.size)
        try:
            if len(data) != task.size:
                raise ValueError(f"it is truncated to {len(data)} of {task.size} bytes")
            image = self.packed(data)
        except ValueError as error:
            return self.bad_sample(
                f"{task.file}: {task.key}",
                error,
                where=f"{path}: {task.key}",
                fix="download it again, or pass --skip-bad",
            )
        return Sample(task.key, image.data, image.extension, task.label)

    @property
    def origin(self) -> InputPath:
        return self.folder

    def notes(self) -> list[str]:
        """Return one line for each item that is missing or skipped without an error."""
        notes = []
        if (in_taxonomy := self._in_taxonomy) is None:
            notes.append(
                f"{DEVKIT}.tar.gz is missing, so the classes have neither words nor a hierarchy: "
                "pass --devkit or --wordnet"
            )
        else:
            notes += in_taxonomy.notes()
        if self._devkit is not None:
            notes += _missing(self._devkit, self._training, self._validation)
        if self._validation is None:
            notes.append(f"there is no test split, because {VAL_TAR} is missing")
        return notes + by_reason(self.skipped())

    def skipped(self) -> list[Skipped]:
        """Return the files and images that are not read."""
        listed = [self._training] + ([self._validation] if self._validation else [])
        reason = "validation image of a class that is not in training"
        return [
            *(one for images in listed for one in images.skipped),
            *(Skipped(f"{image.file}: {image.name}", reason) for image in self._outside),
        ]

    @cached_property
    def _in_taxonomy(self) -> ClassTaxonomy | None:
        taxonomy = self.taxonomy or self._devkit
        return None if taxonomy is None else ClassTaxonomy(taxonomy, self._synsets)

    @cached_property
    def _devkit(self) -> Devkit | None:
        if self.devkit is not None:
            return read_devkit(self.devkit)
        for name in (f"{DEVKIT}.tar.gz", DEVKIT):
            if (self.folder / name).exists():
                return read_devkit(self.folder / name)
        return None

    @cached_property
    def _training(self) -> ImageList:
        return list_training(self.folder, self.report)

    @cached_property
    def _validation(self) -> ImageList | None:
        return list_validation(self.folder, self._devkit)

    @cached_property
    def _synsets(self) -> list[str]:
        synsets = sorted({image.synset for image in self._training.found})
        if len(synsets) < 2:
            raise ValueError(
                f"{self.folder} has {len(synsets)} classes of training images: at least 2 are "
                "required"
            )
        if self._devkit is not None:
            for synset in synsets:
                if synset not in self._devkit.synsets:
                    raise ValueError(
                        f"{self.folder} contains class {synset}, which is not in "
                        f"{self._devkit.path}: pass the matching devkit, or remove the class"
                    )
        return synsets

    @cached_property
    def _splits(self) -> dict[str, list[ImageEntry]]:
        trained = set(self._synsets)
        test = self._validation.found if self._validation else []
        splits = {
            "train": self._training.found,
            "test": [image for image in test if image.synset in trained],
        }
        return {split: images for split, images in splits.items() if images}

    @property
    def _outside(self) -> list[ImageEntry]:
        trained = set(self._synsets)
        listed = self._validation.found if self._validation else []
        return [image for image in listed if image.synset not in trained]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "taxonomy": None, "report": silent}


def _missing(devkit: Devkit, training: ImageList, validation: ImageList | None) -> list[str]:
    """Return one line for each difference from the devkit. Images may have been lost, or the folder
    may contain a subset.
    """
    found = Counter(image.synset for image in training.found)
    expected = {s.wnid: s.num_images for s in devkit.synsets.values() if s.num_images}
    notes = []
    if absent := sorted(expected.keys() - found.keys()):
        notes.append(
            f"training has {len(found):,} of the {len(expected):,} classes in the devkit, missing: "
            f"{_some(absent)}"
        )
    if other := sorted(s for s in expected.keys() & found.keys() if found[s] != expected[s]):
        counts = [f"{s} has {found[s]:,} images instead of {expected[s]:,}" for s in other]
        notes.append(f"training differs from the devkit in {len(other):,} classes: {_some(counts)}")
    if validation is not None and len(validation.found) != len(devkit.truth):
        notes.append(
            f"validation has {len(validation.found):,} of the {len(devkit.truth):,} images in the "
            "devkit"
        )
    return notes


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
