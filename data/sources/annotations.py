"""Images with JSON annotations in the format of COCO and iNaturalist."""

from functools import cached_property
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import shown
from data.option import Argument, Option
from data.remote.input_path import Input, InputPath, check_folder
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import TRAIN, checked_split, shard_splits, split_name
from data.skipped import Skipped
from data.sources.layouts.class_folders import File, Listing
from data.sources.layouts.coco import Annotations, Category, Id, Several, read_annotations
from data.sources.layouts.listed_paths import base_of, path_inside
from data.sources.listed_images import ListedImages, classes_digest, path_attribute
from data.sources.source import STRICT

_NAMES_FOR_BASE = 20


@dataclass(frozen=True, config=STRICT)
class AnnotatedImages(ListedImages):
    """Images with JSON annotations in the format of COCO or iNaturalist.

    The class of an image is the category of its annotations. The supercategories, or the taxonomic
    ranks of iNaturalist, become the hierarchy of the classes.
    """

    kind = "annotations"
    modality = "image"
    reads = "a folder of images and a JSON file per split with images, annotations and categories"
    held_out = "all splits except train, or --test-fraction of the images if there is only train"
    compares_splits = True

    folder: Annotated[
        Input, Argument(), Field(description="folder that contains the images, at any depth")
    ]
    annotations: Annotated[dict[str, Input], Option(metavar="SPLIT=FILE.json")] = Field(
        min_length=1, description="annotations of a split, such as train or val; can be repeated"
    )
    several: Several = Field(
        default="skip",
        description="what to do with an image whose annotations have several categories: skip it "
        "(skip), or use the category of the annotation with the largest area (largest)",
    )

    def __post_init__(self) -> None:
        check_folder(self.folder, "pass the folder of the images")
        splits = [checked_split(name) for name in self.annotations]
        if TRAIN not in splits:
            raise ValueError("annotations: pass --annotations train=FILE.json")
        if twice := next((name for name in splits if splits.count(name) > 1), None):
            raise ValueError(f"annotations: --annotations: split {twice} is given twice")

    def describe(self) -> SourceInfo:
        names = sorted(f"{name}={path.name}" for name, path in self.annotations.items())
        parameters = {
            "annotations": ",".join(names),
            "several": self.several,
            "classes": classes_digest(self.classes()),  # the JSON determines their order
        }
        return SourceInfo(kind=self.kind, parameters=self._listing_parameters() | parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        about = {category.name: category for category in self._categories.values()}
        return tuple(_class_info(about[name]) for name in self._class_names)

    def notes(self) -> list[str]:
        """Return one line for each reason why images were skipped, and one for unused
        categories.
        """
        notes = super().notes()
        if unused := len(self._categories) - len(self._class_names):
            notes.append(f"{unused:,} categories have no images and are omitted")
        return notes

    @property
    def _labels(self) -> str:
        return ", ".join(str(path) for path in self.annotations.values())

    def _in_order(self, names: set[str]) -> list[str]:
        return [one.name for one in self._categories.values() if one.name in names]

    @cached_property
    def _read(self) -> dict[str, Annotations]:
        found = {
            split_name(name): read_annotations(path, self.several)
            for name, path in self.annotations.items()
        }
        return dict(sorted(found.items(), key=lambda item: item[0] != TRAIN))

    @cached_property
    def _categories(self) -> dict[Id, Category]:
        """The categories of all files. Raises ValueError if they differ between files."""
        first, *others = self._read.values()
        for other in others:
            for number in first.categories.keys() & other.categories.keys():
                one, two = first.categories[number].name, other.categories[number].name
                if one != two:
                    raise ValueError(
                        f"{other.path}: category {shown(number)} is {shown(two)}, but "
                        f"{shown(one)} in {first.path}: use annotations with the same categories"
                    )
        return first.categories

    @cached_property
    def _listing(self) -> Listing:
        listing = Listing()
        seen: dict[str, InputPath] = {}
        files: list[File] = []
        for split, found in self._read.items():
            files += self._of_split(listing, split, found, seen)
        trained = {file.class_name for file in files if file.split == TRAIN}
        only_train = len(self._read) == 1
        in_shards = shard_splits(self._read)
        for file in files:
            if file.class_name in trained:
                of_file = None if only_train else in_shards[str(file.split)]
                listing.files.append(file._replace(split=of_file))
            else:
                listing.skipped.append(Skipped(file.path, "its category has no training images"))
        listing.skip_unlisted(self.folder, seen)
        listing.files.sort()
        listing.skipped.sort()
        return listing

    def _of_split(
        self, listing: Listing, split: str, found: Annotations, seen: dict[str, InputPath]
    ) -> list[File]:
        base = base_of(self.folder, list(found.names.values())[:_NAMES_FOR_BASE], split, found.path)
        files = []
        for number, name in found.names.items():
            where = f"{found.path}, image {shown(number)}"
            try:
                path = path_inside(self.folder, name, base)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if path in seen:
                raise ValueError(
                    f"{where}: {shown(name)} is also an image in {seen[path]}: remove one of them"
                )
            seen[path] = found.path
            if (reason := found.unusable.get(number)) is not None:
                listing.skipped.append(Skipped(path, reason))
            elif not (self.folder / path).is_file():
                if not self.skip_bad:
                    raise FileNotFoundError(
                        f"{where}: {shown(path)} is missing from {self.folder}: "
                        "add it, or pass --skip-bad"
                    )
                listing.skipped.append(Skipped(path, f"in {found.path.name}, but missing"))
            else:
                category = found.categories[found.category_of[number]]
                files.append(File(path, category.name, split))
        return files


def _class_info(category: Category) -> ClassInfo:
    attributes = path_attribute(category.above)
    if category.words is not None:
        attributes["words"] = category.words
    return ClassInfo(name=category.name, attributes=attributes)
