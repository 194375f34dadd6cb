"""Reads files of class names, and maps the label of a sample to its class.

A label is the text of `<key>.cls` or a field of `<key>.json`. It is either a name in the class list
or a position in the list. A set of labels is a text with spaces between the labels, or a list in
the field.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from data.classes.class_list import ClassList
from data.messages import shown
from data.shards.manifest import Manifest

LABEL_EXTENSIONS = ("cls", "json")
INDEXED = "index"
"""The kind of source of shards that `kway shard index` has indexed."""
_MAX_DIGITS = 18


def read_class_names(path: Path) -> list[str]:
    """Return the names in a file, without surrounding whitespace or trailing empty lines.

    Raises FileNotFoundError if the file is missing, and ValueError, with the line number, for an
    empty or repeated name, and for a file that is not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"class list {path} does not exist: pass a file with one class name per line"
        )
    try:
        with path.open(encoding="utf-8-sig") as file:
            names = [line.strip() for line in file]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save the file as UTF-8") from error
    while names and not names[-1]:
        names.pop()
    first: dict[str, int] = {}
    for number, name in enumerate(names or [""], start=1):
        if not name:
            raise ValueError(f"{path}, line {number} is empty: write one class name per line")
        if first.setdefault(name, number) != number:
            raise ValueError(
                f"{path}, line {number}: {shown(name)} is also on line {first[name]}: rename "
                "one of them"
            )
    return names


def label_texts(
    extension: str, data: bytes, json_field: str, *, label_sets: bool = False
) -> list[str]:
    """Return the label as stored or, with `label_sets`, all labels, without surrounding whitespace.

    Raises ValueError for an empty label, for a list without `label_sets`, and if there is no label.

    json_field: the field of a `.json` member with the label; dots select nested fields.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"its .{extension} is not UTF-8") from error
    if extension.lower() == "json":
        found = _field(text, json_field, label_sets)
    else:
        found = text.split() if label_sets else [text]
    stripped = [one.strip() for one in found]
    if not all(stripped):
        raise ValueError("the label is empty")
    if any("\ud800" <= character <= "\udfff" for one in stripped for character in one):
        raise ValueError("the label contains a lone surrogate, which UTF-8 cannot store")
    return stripped


def _field(text: str, json_field: str, label_sets: bool) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its .json is damaged ({error})") from error
    for name in json_field.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"field {json_field!r} is missing from its .json")
        value = value[name]
    if isinstance(value, list) and not label_sets:
        raise ValueError(
            f"field {json_field!r} of its .json is a list: pass --label-sets to kway shard index"
        )
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int | str) for one in values):
        raise ValueError(f"field {json_field!r} of its .json is neither a number nor a name")
    return [str(one) for one in values]


@dataclass(frozen=True)
class Labels:
    """What the labels in tars mean. positions: whether integers are positions in the list."""

    classes: ClassList
    positions: bool

    @classmethod
    def found(cls, texts: Iterable[str]) -> "Labels":
        """Use the distinct labels as classes, in `label_order`."""
        return cls(ClassList.of_names(label_order(set(texts))), positions=False)

    @classmethod
    def read(cls, path: Path) -> "Labels":
        """Read a file with one class name per line. Raises the errors of `read_class_names`."""
        return cls(ClassList.of_names(read_class_names(path)), positions=True)

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> "Labels":
        """Use the class list of shards. Labels have the same meaning as in their tars."""
        source = manifest.source
        positions = source.kind != INDEXED or bool(source.parameters.get("positions"))
        return cls(manifest.classes, positions)

    def label(self, text: str) -> int:
        """Return the class that `text` names. Raises ValueError if it is not in the list."""
        if self.positions and is_number(text):
            if not 0 <= int(text) < len(self.classes):
                raise ValueError(
                    f"label {text} is out of range: there are {len(self.classes)} classes"
                )
            return int(text)
        if (found := self.classes.find(text)) is None:
            raise ValueError(
                f"label {shown(text)} is not one of the {len(self.classes)} class names"
            )
        return found


def label_order(labels: Collection[str]) -> list[str]:
    """Return the labels in numerical order if all of them are numbers, otherwise by name."""
    numbers = all(map(is_number, labels))
    return sorted(labels, key=lambda label: (int(label), label) if numbers else (0, label))


def is_number(label: str) -> bool:
    """Return whether a label is an integer. Texts that are too long for one are names."""
    return len(label) <= _MAX_DIGITS and label.isascii() and label.removeprefix("-").isdecimal()
