"""Reads JSON annotations in the format of COCO, which iNaturalist also uses.

    {"images": [{"id": 1, "file_name": "a.jpg"}],
     "annotations": [{"image_id": 1, "category_id": 3, "area": 20.5}],
     "categories": [{"id": 3, "name": "cat", "supercategory": "animal"}]}

The file is not trusted: every entry is checked, and its size is limited.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from data.messages import shown
from data.remote.input_path import InputPath
from data.shards.manifest import paused_gc

Several = Literal["skip", "largest"]
MAX_BYTES = 4 << 30  # the largest published file, that of iNaturalist 2021, has 0.4 GB
# Ranks above a species in the categories of iNaturalist, from the root down.
_RANKS = ("kingdom", "phylum", "class", "order", "family", "genus")
_NO_NAME = ("", "none")  # exporters write "none" if there is no supercategory

Id = int | str


@dataclass(frozen=True)
class Category:
    """A category. above: the names of its supercategories or taxonomic ranks, from the root."""

    name: str
    above: tuple[str, ...] = ()
    words: str | None = None


@dataclass
class Annotations:
    """The contents of an annotation file.

    names: the file name of each image, in the order of the file. category_of: the category of each
    annotated image. unusable: the reason for each image that does not have a single category.
    """

    path: InputPath
    categories: dict[Id, Category] = field(default_factory=dict)
    names: dict[Id, str] = field(default_factory=dict)
    category_of: dict[Id, Id] = field(default_factory=dict)
    unusable: dict[Id, str] = field(default_factory=dict)


def read_annotations(path: InputPath, several: Several) -> Annotations:
    """Read an annotation file.

    several: the category of an image whose annotations have several categories. "skip": the image
    is unusable. "largest": that of the annotation with the largest area.

    Raises FileNotFoundError for a missing file, and a one-line ValueError with the file, the entry
    and the fix for one that is too large or malformed.
    """
    content = _parsed(path)
    found = Annotations(path)
    for where, entry in _entries(path, content, "categories"):
        number = _id(where, entry, "id")
        if number in found.categories:
            raise ValueError(f"{where}: ID {shown(number)} is already used: remove one category")
        found.categories[number] = _category(where, entry)
    _check_category_names(path, found.categories)
    for where, entry in _entries(path, content, "images"):
        number = _id(where, entry, "id")
        if number in found.names:
            raise ValueError(f"{where}: ID {shown(number)} is already used: remove one image")
        found.names[number] = _text(where, entry, "file_name")
    areas: dict[Id, dict[Id, float]] = {}
    for where, entry in _entries(path, content, "annotations"):
        image, category = _id(where, entry, "image_id"), _id(where, entry, "category_id")
        if image not in found.names:
            raise ValueError(
                f"{where}: image {shown(image)} is not in `images`: remove the annotation"
            )
        if category not in found.categories:
            raise ValueError(
                f"{where}: category {shown(category)} is not in `categories`: add it, or "
                "remove the annotation"
            )
        area = _area(where, entry, required=several == "largest")
        of_image = areas.setdefault(image, {})
        of_image[category] = max(of_image.get(category, area), area)
    for image in found.names:
        of_image = areas.get(image, {})
        if len(of_image) == 1 or (of_image and several == "largest"):
            found.category_of[image] = max(of_image, key=lambda one: of_image[one])
        elif of_image:
            found.unusable[image] = "annotated with several categories (--several skip)"
        else:
            found.unusable[image] = "no annotation"
    return found


@paused_gc()
def _parsed(path: InputPath) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass a JSON file of annotations")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, but the limit is {MAX_BYTES:,}: remove fields such as "
            "segmentation"
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} is not valid JSON ({reason}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: pass a file of annotations")
    return content


def _entries(
    path: InputPath, content: dict[str, Any], key: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the content of each entry of a list."""
    entries = content.get(key)
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{path} does not contain a list {key!r}: pass a file with images, annotations and "
            "categories"
        )
    for number, entry in enumerate(entries):
        where = f"{path}, {key}[{number}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is not a JSON object: correct it")
        yield where, entry


def _id(where: str, entry: dict[str, Any], key: str) -> Id:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{where}: {key!r} is {shown(value)}: use a number or a string")
    return value


def _text(where: str, entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    # A lone surrogate can be written in JSON, but not in UTF-8.
    if not isinstance(value, str) or not value.strip() or not _is_utf8(value):
        raise ValueError(f"{where}: {key!r} is {shown(value)}: it must be a text")
    return value.strip()


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _area(where: str, entry: dict[str, Any], *, required: bool) -> float:
    """Return the area of an annotation or, if it has none, the area of its box."""
    area, box = entry.get("area"), entry.get("bbox")
    if area is None and isinstance(box, list) and len(box) == 4 and all(map(_is_number, box)):
        area = box[2] * box[3]
    if isinstance(area, int | float) and _is_number(area):
        return float(area)
    if required:
        raise ValueError(f"{where} has neither an area nor a box: omit --several largest")
    return 0.0


def _is_number(value: Any) -> bool:
    # JSON may contain NaN, infinity, and integers that are too large for a float.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -1e18 < value < 1e18


def _category(where: str, entry: dict[str, Any]) -> Category:
    name = _text(where, entry, "name")
    ranks: Sequence[str] = [key for key in _RANKS if key in entry] or ("supercategory",)
    above = [entry[key] for key in ranks if isinstance(entry.get(key), str)]
    above = [one.strip() for one in above if one.strip().lower() not in _NO_NAME]
    words = entry.get("common_name")
    is_word = isinstance(words, str) and words.strip() and _is_utf8(words)
    # Remove repeated names, because a node cannot be its own ancestor.
    return Category(name, tuple(dict.fromkeys(above)), f"{words}, {name}" if is_word else None)


def _check_category_names(path: InputPath, categories: dict[Id, Category]) -> None:
    seen: dict[str, Id] = {}
    for number, category in categories.items():
        if seen.setdefault(category.name, number) != number:
            raise ValueError(
                f"{path}: categories {shown(seen[category.name])} and {shown(number)} are both "
                f"called {shown(category.name)}: rename one of them"
            )
