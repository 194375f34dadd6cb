"""The class list of a bundle.

classes.safetensors  the columns of a `SearchableClassList`
classes.jsonl        formats 2 to 5 instead: {"name": …, "attributes": {…}}, one class per line
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from pydantic import ValidationError

from data.classes.class_list import ClassInfo
from data.classes.search import SearchableClassList
from trainer.bundle.spec import CLASSES, LINES


def write_classes(folder: Path, classes: Iterable[ClassInfo]) -> int:
    """Write the class list to `folder` and return the number of classes.

    Raises ValueError for a duplicate name or an empty list.
    """
    listed = SearchableClassList.of(classes)
    if not len(listed):
        raise ValueError("the class list is empty: a bundle needs at least one class")
    listed.write(folder / CLASSES)
    return len(listed)


def open_classes(folder: Path, num_classes: int, files: Collection[str]) -> SearchableClassList:
    """Open the class list of a bundle. Raises ValueError if it does not contain `num_classes`."""
    if LINES not in files:
        return SearchableClassList.open(folder / CLASSES, num_classes)
    infos = []
    with (folder / LINES).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                infos.append(ClassInfo.model_validate_json(line))
            except ValidationError as error:
                raise ValueError(
                    f"{folder / LINES}: line {number} is not a valid class: copy the bundle again"
                ) from error
    if len(infos) != num_classes:
        raise ValueError(
            f"{folder / LINES} contains {len(infos):,} classes instead of {num_classes:,}: copy "
            "the bundle again"
        )
    return SearchableClassList.of(infos)
