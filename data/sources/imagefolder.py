"""A folder with one subfolder of images per class, or a folder of images with label files."""

from dataclasses import field
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from data.option import Argument, Option
from data.remote.input_path import Input, check_folder
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import checked_split, split_name
from data.sources.layouts.class_folders import CLASS_FROM, Listing, list_class_folders
from data.sources.layouts.label_files import ClassNames, LabelFiles
from data.sources.layouts.taxonomy import ClassTaxonomy, TaxonomyOption
from data.sources.listed_images import ListedImages, classes_digest, path_attribute
from data.sources.source import STRICT


@dataclass(frozen=True, config=STRICT)
class ImageFolder(ListedImages):
    """A folder with one subfolder of images per class, or a folder of images with label files.

    The class folders are in the folder itself or in subfolders that are named after splits, such as
    `train/` and `test/` or `val/` (see docs/data.md).
    """

    kind = "imagefolder"
    modality = "image"
    reads = "class folders of images, or the images that --labels or --split-labels list"
    held_out = (
        "test/, val/ and similar, or --test-fraction of the images, chosen by a hash of their paths"
    )
    compares_splits = True

    folder: Annotated[
        Input,
        Argument(),
        Field(description="folder that contains the class folders, or train/ and test/"),
    ]
    labels: Input | None = Field(
        default=None,
        description="file with one line `file,class` per image, used instead of class folders; a "
        "first line `file,class,split` adds the split",
    )
    split_labels: Annotated[dict[str, Input], Option(metavar="SPLIT=FILE")] = Field(
        default_factory=dict,
        description="file with one line per image of a split: its path and its label, separated by "
        "a tab, a comma or a space; can be repeated; other splits are read from class folders",
    )
    class_names: Input | None = Field(
        default=None,
        description="file that names the labels in label files: a name, or a name and its number, "
        "per line",
    )
    class_from: Annotated[str | None, Option(metavar="leaf|path|N")] = Field(
        default=None,
        pattern=CLASS_FROM,
        description="folder that defines the class of an image: the one that contains the image, "
        "by its name (leaf) or its path (path), or the N-th folder below the root or the split "
        "(-N counts from the end)",
    )
    taxonomy: TaxonomyOption = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_folder(self.folder, "pass a folder that contains class folders")
        if self.labels is not None and self.split_labels:
            raise ValueError("imagefolder: pass either --labels or --split-labels")
        if self.labels is not None and self.class_from is not None:
            raise ValueError(
                f"imagefolder: --labels {self.labels} defines the classes: omit --class-from"
            )
        if self.class_names is not None and self.labels is None and not self.split_labels:
            raise ValueError(
                "imagefolder: --class-names names the labels in a label file: pass --labels or "
                "--split-labels"
            )
        if self.class_from in ("leaf", "path") and self.taxonomy is not None:
            raise ValueError(
                f"imagefolder: --class-from {self.class_from} defines the hierarchy: omit --wordnet"
            )
        splits = [checked_split(name) for name in self.split_labels]
        if twice := next((name for name in splits if splits.count(name) > 1), None):
            raise ValueError(f"imagefolder: --split-labels: split {twice} is given twice")

    def describe(self) -> SourceInfo:
        parameters = self._listing_parameters()
        parameters["labels"] = self.labels.name if self.labels else None
        if self.split_labels:
            names = sorted(f"{name}={path.name}" for name, path in self.split_labels.items())
            parameters["split_labels"] = ",".join(names)
        if self.class_names is not None:  # it determines the order of the classes
            parameters["class_names"] = classes_digest(self.classes())
        if self.class_from is not None:
            parameters["class_from"] = self.class_from
        if self.taxonomy is not None:
            parameters["taxonomy"] = classes_digest(self.classes())
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        names = self._class_names
        if (in_taxonomy := self._in_taxonomy) is not None:
            attributes = in_taxonomy.attributes()
        else:
            attributes = [path_attribute(folders) for folders in self._folders_above()]
        return tuple(
            ClassInfo(name=name, attributes=about)
            for name, about in zip(names, attributes, strict=True)
        )

    def _folders_above(self) -> list[tuple[str, ...]]:
        """Return the folders above each class.

        The folder of the class itself is included if it also contains other classes.
        """
        paths = [self._listing.folders.get(name, (name,)) for name in self._class_names]
        inner = {path[:length] for path in paths for length in range(1, len(path))}
        return [path if path in inner else path[:-1] for path in paths]

    def notes(self) -> list[str]:
        """Return one line for each reason why files were skipped, and one for each choice that was
        made.
        """
        notes = super().notes()
        if self._named is not None and (n := len(self._named.names) - len(self._class_names)):
            notes.append(f"{n:,} classes in {self._named.path} have no images and are omitted")
        if (in_taxonomy := self._in_taxonomy) is not None:
            notes += in_taxonomy.notes()
        return notes

    @cached_property
    def _in_taxonomy(self) -> ClassTaxonomy | None:
        if self.taxonomy is None:
            return None
        return ClassTaxonomy(self.taxonomy, self._class_names)

    @cached_property
    def _named(self) -> ClassNames | None:
        return None if self.class_names is None else ClassNames(self.class_names)

    @cached_property
    def _listing(self) -> Listing:
        files = LabelFiles(self.folder, self._named, self.skip_bad)
        if self.labels is not None:
            return files.one(self.labels)
        splits = {split_name(name) for name in self.split_labels}
        folders = list_class_folders(self.folder, class_from=self.class_from, labeled=splits)
        return files.of_splits(self.split_labels, folders) if splits else folders

    @property
    def _labels(self) -> str:
        return str(self.labels or self.folder)

    def _in_order(self, names: set[str]) -> list[str]:
        if self._named is None:
            return sorted(names)
        others = names - set(self._named.names)
        return [name for name in self._named.names if name in names] + sorted(others)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "taxonomy": None}
