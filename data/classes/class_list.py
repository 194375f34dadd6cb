"""The classes of a data set or a model, in columns that the processes of a machine share.

A class takes its name and 20 bytes: 8 for the end of its name, and 12 for its position in the
sorted hashes of all names, in which a name is looked up by binary search. A hierarchy takes 4 bytes
per class, and other attributes take their JSON and 8 bytes per class. The file of a list is mapped
into memory and read page by page, so a list of 100,000,000 classes opens immediately.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from data.classes.columns import mapped_columns, write_columns
from data.classes.strings import CHUNK, Strings, equal_strings, hash_of
from data.files import flush, sha256_of


class ClassInfo(BaseModel):
    """A class: its name, which is unique in the class list, and the attributes that its source
    provides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    attributes: dict[str, str] = {}


class ClassList(Sequence[ClassInfo]):
    """K classes. The label or ID of a class is its position in the list."""

    def __init__(self, columns: Mapping[str, NDArray[Any]], path: Path | None = None) -> None:
        """columns: those that `of` creates and `open` reads, by the names in `_TYPES`. path: their
        file.
        """
        self.columns, self._path = columns, path
        self.names = Strings(columns["names"], columns["name_ends"], path)
        self._attributes = self._optional("attributes", "attribute_ends")
        self._paths = self._optional("paths", "path_ends")
        self._found: dict[str, int] = {}

    @classmethod
    def of(cls, infos: Iterable[ClassInfo]) -> "ClassList":
        """Copy classes to new columns. Raises ValueError if two classes have the same name, or if a
        text contains a lone surrogate.
        """
        names, attributes = [], []
        number: dict[str, int] = {}
        path_of_class = array("i")

        def attributes_of(info: ClassInfo) -> str:
            path = info.attributes.get(PATH)
            path_of_class.append(-1 if path is None else number.setdefault(path, len(number)))
            # `path` keeps its position among the attributes, but its text is stored once.
            own = info.attributes if path is None else {**info.attributes, PATH: None}
            return json.dumps(own, ensure_ascii=False) if own else ""

        rest = iter(infos)
        while chunk := list(islice(rest, CHUNK)):
            names.append(Strings.of(info.name for info in chunk))
            attributes.append(Strings.of(map(attributes_of, chunk)))
        paths = Strings.of(number), np.frombuffer(path_of_class, np.int32)
        return cls(_columns_of(Strings.joined(names), Strings.joined(attributes), *paths))

    @classmethod
    def of_names(cls, names: Iterable[str]) -> "ClassList":
        """Copy names to new columns. Raises ValueError if two names are equal."""
        nothing = Strings.of([])
        return cls(_columns_of(Strings.of(names), nothing, nothing, np.zeros(0, np.int32)))

    @classmethod
    def open(cls, path: Path, num_classes: int | None = None) -> "ClassList":
        """Map a file that `write` wrote. Raises ValueError if it is damaged or has another number
        of classes. Names are decoded only when they are read.
        """
        columns = mapped_columns(path, _TYPES)
        if not columns.keys() >= _REQUIRED:
            missing = min(_REQUIRED - columns.keys())
            raise ValueError(f"{path} does not contain the array {missing}: copy it again")
        opened = cls(columns, path)
        lengths = {len(columns[name]) for name in _PER_CLASS & columns.keys()}
        if lengths != {wanted := len(opened) if num_classes is None else num_classes}:
            raise ValueError(
                f"{path} contains {len(opened):,} classes instead of {wanted:,}: copy it again"
            )
        for text, ends in _TEXTS:
            size = int(columns[ends][-1]) if len(columns.get(ends, ())) else 0
            if (text in columns) != (ends in columns) or len(columns.get(text, ())) != size:
                raise ValueError(f"{path} is damaged (a column is not complete): copy it again")
        if ("paths" in columns) != ("path_of_class" in columns):
            raise ValueError(f"{path} is damaged (a column is missing): copy it again")
        return opened

    def write(self, path: Path) -> str:
        """Write the columns to a safetensors file. Return its SHA-256."""
        with path.open("wb") as file:
            write_columns(file, self.columns)
            flush(file)
        return sha256_of(path)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the same file, unless its machine does not have it.
        if self._path is not None and self._path.is_file():
            return type(self).open, (self._path.absolute(), len(self))
        return type(self), (dict(self.columns),)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> ClassInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[ClassInfo]: ...
    def __getitem__(self, index: int | slice) -> ClassInfo | list[ClassInfo]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return ClassInfo(name=self.names[index], attributes=self.attributes(index))

    def __iter__(self) -> Iterator[ClassInfo]:
        for class_id, name in enumerate(self.names):
            yield ClassInfo(name=name, attributes=self.attributes(class_id))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClassList):
            return NotImplemented
        return self.columns.keys() == other.columns.keys() and all(
            np.array_equal(column, other.columns[name]) for name, column in self.columns.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def attributes(self, class_id: int) -> dict[str, str]:
        """Return the attributes of a class."""
        text = "" if self._attributes is None else self._attributes[class_id]
        found: dict[str, str] = json.loads(text) if text else {}
        if self._paths is not None and PATH in found:
            found[PATH] = self._paths[int(self.columns["path_of_class"][class_id])]
        return found

    def paths(self) -> tuple[Strings, NDArray[np.int32]]:
        """Return the distinct values of the attribute `path`, and the number of the one of each
        class [K], which is -1 for a class without a path.
        """
        if self._paths is None:
            return Strings.of([]), np.full(len(self), -1, np.int32)
        return self._paths, self.columns["path_of_class"]

    def find(self, name: str) -> int | None:
        """Return the class with exactly this name, or None if there is none."""
        found = self._found.get(name)
        if found is None and (found := self._search(name)) is not None:
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            self._found[name] = found
        return found

    def _search(self, name: str) -> int | None:
        try:
            wanted = np.uint64(hash_of(name))
        except UnicodeEncodeError:  # a lone surrogate, which no name contains
            return None
        hashes, by_hash = self.columns["name_hashes"], self.columns["ids_by_hash"]
        position = int(np.searchsorted(hashes, wanted))
        while position < len(self) and hashes[position] == wanted:
            class_id = int(by_hash[position])
            if 0 <= class_id < len(self) and self.names[class_id] == name:
                return class_id
            position += 1
        return None

    def find_all(self, names: Strings) -> NDArray[np.int32]:
        """Return the class of each name [N], or -1 if there is none."""
        found = [self._find_chunk(chunk) for chunk in names.chunks()]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _find_chunk(self, names: Strings) -> NDArray[np.int32]:
        hashes, wanted = self.columns["name_hashes"], names.hashes()
        position = np.searchsorted(hashes, wanted)
        position[position == len(self)] = 0
        found: NDArray[np.int32] = self.columns["ids_by_hash"][position]
        has_hash = (hashes[position] == wanted) & (found >= 0) & (found < len(self))
        hits = np.flatnonzero(has_hash)
        is_equal = equal_strings(names.at(hits), self.names.at(found[hits]))
        found[~has_hash] = -1
        for number in hits[~is_equal].tolist():  # two names with the same hash
            class_id = self._search(names[number])
            found[number] = -1 if class_id is None else class_id
        return found

    def united(self, other: "ClassList") -> tuple["ClassList", NDArray[np.int32]]:
        """Return these classes, followed by those of `other` with other names, and the class [K']
        of each class of `other` in the result.
        """
        labels = self.find_all(other.names)
        added = np.flatnonzero(labels < 0)
        if not len(added):
            return self, labels
        labels[added] = np.arange(len(self), len(self) + len(added), dtype=np.int32)
        names = Strings.joined([self.names, other.names.at(added)])
        attributes = Strings.joined([self._texts(), other._texts().at(added)])
        (paths, path_of_class), (others, path_of_other) = self.paths(), other.paths()
        number = {path: i for i, path in enumerate(paths)}
        distinct, first = np.unique(path_of_other[added], return_index=True)
        renumbered = np.full(len(others) + 1, -1, np.int32)  # the last element is for -1
        for other_number in distinct[np.argsort(first)].tolist():
            if other_number >= 0:
                path = others[other_number]
                renumbered[other_number] = number.setdefault(path, len(number))
        path_of_class = np.append(path_of_class, renumbered[path_of_other[added]])
        return ClassList(_columns_of(names, attributes, Strings.of(number), path_of_class)), labels

    def _optional(self, text: str, ends: str) -> Strings | None:
        if not {text, ends} <= self.columns.keys():
            return None
        return Strings(self.columns[text], self.columns[ends], self._path)

    def _texts(self) -> Strings:
        """Return the attributes of all classes."""
        empty = Strings(np.zeros(0, np.uint8), np.zeros(len(self), np.int64))
        return empty if self._attributes is None else self._attributes


def _columns_of(
    names: Strings,
    attributes: Strings,
    paths: Strings,
    path_of_class: NDArray[np.int32],
) -> dict[str, NDArray[Any]]:
    """Return the columns of a list. Raises ValueError for a repeated or empty name."""
    empty = np.flatnonzero(names.lengths() == 0)
    if len(empty):
        raise ValueError(f"the name of class {empty[0]} is empty: give it a name")
    hashes = names.hashes()
    by_hash = np.argsort(hashes, kind="stable").astype(np.int32)
    hashes = hashes[by_hash]
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    seen: set[str] = set()
    for class_id in np.unique(by_hash[np.concatenate([equal, equal + 1])]).tolist():
        if names[class_id] in seen:
            raise ValueError(f"class {names[class_id]!r} is listed twice")
        seen.add(names[class_id])
    columns: dict[str, NDArray[Any]] = {
        "names": names.text,
        "name_ends": names.ends,
        "name_hashes": hashes,
        "ids_by_hash": by_hash,
    }
    if len(attributes.text):
        columns |= {"attributes": attributes.text, "attribute_ends": attributes.ends}
    if len(paths):
        columns |= {"paths": paths.text, "path_ends": paths.ends, "path_of_class": path_of_class}
    return columns


PATH = "path"
"""The attribute with the names of the nodes above a class; see `data/shards/hierarchy.py`."""
_MAX_FOUND = 1 << 16  # names whose lookups are kept
_TYPES: dict[str, type[np.generic]] = {
    "names": np.uint8,  # UTF-8, as are the other texts
    "name_ends": np.int64,
    "name_hashes": np.uint64,  # in ascending order
    "ids_by_hash": np.int32,  # the class of each hash
    "attributes": np.uint8,  # JSON objects, or nothing
    "attribute_ends": np.int64,
    "paths": np.uint8,  # distinct
    "path_ends": np.int64,
    "path_of_class": np.int32,
    "folded": np.uint8,  # case-folded names, see `data/classes/search.py`
    "folded_ends": np.int64,
}
_TEXTS = (
    ("names", "name_ends"),
    ("attributes", "attribute_ends"),
    ("paths", "path_ends"),
    ("folded", "folded_ends"),
)
_REQUIRED = {"names", "name_ends", "name_hashes", "ids_by_hash"}
_PER_CLASS = {
    "name_ends",
    "name_hashes",
    "ids_by_hash",
    "attribute_ends",
    "path_of_class",
    "folded_ends",
}
