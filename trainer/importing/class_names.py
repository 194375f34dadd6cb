"""The class list of an imported model: unique, non-empty names in the order of its logits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.bundle.spec import ClassEntry

_LABEL = "label"  # the attribute with the original name of a renamed class


def class_entries(names: Sequence[str]) -> list[ClassEntry]:
    """Return the classes for these names.

    An empty name becomes `class 5`, for class 5. A name that several classes have gets the number
    of each of these classes, as in `crane (134)` and `crane (517)`; the original name is then in
    the attribute `label`.
    """
    counts = Counter(names)
    taken = {name for name, count in counts.items() if count == 1}
    entries = []
    for number, name in enumerate(names):
        if name and counts[name] == 1:
            entries.append(ClassEntry(name=name))
            continue
        unique = f"{name} ({number})" if name else f"class {number}"
        while unique in taken:
            unique += "'"
        taken.add(unique)
        entries.append(ClassEntry(name=unique, attributes={_LABEL: name} if name else {}))
    return entries


def names_of_config(id2label: Mapping[Any, str], num_classes: int) -> list[str]:
    """Return the names of a transformers configuration, empty where it has none."""
    return [str(id2label.get(number, "")) for number in range(num_classes)]


def names_in_file(file: Path, num_classes: int) -> list[str]:
    """Return the lines of a text file. Raises ValueError unless there is one per class."""
    try:
        names = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}): save it as UTF-8") from error
    if len(names) != num_classes:
        raise ValueError(
            f"{file} has {len(names):,} lines, but the model has {num_classes:,} classes: write "
            "one class name per line, in the order of the logits"
        )
    return names
