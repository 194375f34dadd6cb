"""The classes of a data set or a model, in columns that the processes of a machine share.

A class costs its name and 20 bytes: 8 for the end of its name, and 12 for its place in the sorted
hashes of all names, in which a name is looked up by binary search. Attributes, if there are any,
cost their JSON and 8 bytes per class. A list of 100,000,000 classes opens at once, because its file
is mapped into memory and read page by page.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors.numpy import save_file

from data.classes.columns import mapped_columns
from data.classes.strings import Strings, equal_strings


class ClassInfo(BaseModel):
    """A class: its name, which is unique in the class list, and the attributes that its source
    provides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    attributes: dict[str, str] = {}


class ClassList(Sequence[ClassInfo]):
    """K classes. The label or ID of a class is its position in the list."""

    def __init__(
        self,
        names: Strings,
        attributes: Strings | None,
        hashes: NDArray[np.uint64],
        by_hash: NDArray[np.int32],
    ) -> None:
        """names [K]. attributes [K]: JSON objects, or empty strings. hashes [K]: the hashes of the
        names in ascending order. by_hash [K]: the class of each hash.
        """
        self.names, self._attributes = names, attributes
        self._hashes, self._by_hash = hashes, by_hash
        self._found: dict[str, int] = {}

    @classmethod
    def of(cls, infos: Iterable[ClassInfo]) -> "ClassList":
        """Copy classes to new columns. Raises ValueError if two classes have the same name."""
        attributes: list[str] = []

        def names() -> Iterator[str]:
            for info in infos:
                attributes.append(
                    json.dumps(info.attributes, ensure_ascii=False) if info.attributes else ""
                )
                yield info.name

        return cls.of_columns(Strings.of(names()), Strings.of(attributes))

    @classmethod
    def of_columns(cls, names: Strings, attributes: Strings | None = None) -> "ClassList":
        """Index the names. Raises ValueError if two classes have the same name."""
        hashes = names.hashes()
        by_hash = np.argsort(hashes, kind="stable").astype(np.int32)
        if attributes is not None and not len(attributes.text):
            attributes = None
        found = cls(names, attributes, hashes[by_hash], by_hash)
        if (twice := found._first_repeated()) is not None:
            raise ValueError(f"class {twice!r} is listed twice")
        return found

    @classmethod
    def of_names(cls, names: Iterable[str]) -> "ClassList":
        """Copy names to new columns. Raises ValueError if two names are equal."""
        return cls.of_columns(names if isinstance(names, Strings) else Strings.of(names))

    @classmethod
    def open(cls, path: Path, num_classes: int) -> "ClassList":
        """Map a file that `write` wrote. Raises ValueError if it is damaged or has another number
        of classes. Names are decoded only when they are read.
        """
        found = mapped_columns(path, _TYPES)
        try:
            attributes = None
            if "attributes" in found:
                attributes = Strings(found["attributes"], found["attribute_ends"])
            names = Strings(found["names"], found["name_ends"])
            opened = cls(names, attributes, found["name_hashes"], found["ids_by_hash"])
        except KeyError as error:
            raise ValueError(f"{path} has no column {error}: copy it again") from error
        columns = [column for column in (names, attributes) if column is not None]
        lengths = {*map(len, columns), len(opened._hashes), len(opened._by_hash)}
        if lengths != {num_classes}:
            raise ValueError(
                f"{path} has {len(names):,} classes instead of {num_classes:,}: copy it again"
            )
        if any(len(column.text) != column.ends[-1] for column in columns):
            raise ValueError(f"{path} is damaged: copy it again")
        return opened

    def write(self, path: Path) -> str:
        """Write the columns to a safetensors file. Return its SHA-256."""
        columns: dict[str, NDArray[Any]] = {
            "names": self.names.text,
            "name_ends": self.names.ends,
            "name_hashes": self._hashes,
            "ids_by_hash": self._by_hash,
        }
        if self._attributes is not None:
            columns["attributes"] = self._attributes.text
            columns["attribute_ends"] = self._attributes.ends
        save_file(columns, path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

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
        if self._attributes is None:
            yield from (ClassInfo(name=name) for name in self.names)
            return
        for name, text in zip(self.names, self._attributes, strict=True):
            yield ClassInfo(name=name, attributes=json.loads(text) if text else {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClassList):
            return NotImplemented
        return self.names == other.names and self._attributes == other._attributes

    __hash__ = None  # type: ignore[assignment]

    def attributes(self, class_id: int) -> dict[str, str]:
        """Return the attributes of a class."""
        text = "" if self._attributes is None else self._attributes[class_id]
        found: dict[str, str] = json.loads(text) if text else {}
        return found

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
            wanted = Strings.of([name]).hashes()[0]
        except UnicodeEncodeError:  # a lone surrogate, which no name contains
            return None
        position = int(np.searchsorted(self._hashes, wanted))
        while position < len(self) and self._hashes[position] == wanted:
            class_id = int(self._by_hash[position])
            if self.names[class_id] == name:
                return class_id
            position += 1
        return None

    def find_all(self, names: Strings) -> NDArray[np.int32]:
        """Return the class of each name [N], and -1 for a name that no class has."""
        found = [self._find_chunk(chunk) for chunk in names.chunks()]
        return np.concatenate([np.zeros(0, np.int32), *found])

    def _find_chunk(self, names: Strings) -> NDArray[np.int32]:
        wanted = names.hashes()
        position = np.searchsorted(self._hashes, wanted)
        position[position == len(self)] = 0
        found = self._by_hash[position].astype(np.int32)
        has_hash = self._hashes[position] == wanted
        hits = np.flatnonzero(has_hash)
        is_equal = equal_strings(names.at(hits), self.names.at(found[hits]))
        found[~has_hash] = -1
        for number in hits[~is_equal].tolist():  # two names with the same hash
            class_id = self.find(names[number])
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
        attributes = None
        if self._attributes is not None or other._attributes is not None:
            attributes = self._json() + other._json().at(added)
        return ClassList.of_columns(self.names + other.names.at(added), attributes), labels

    def _json(self) -> Strings:
        if self._attributes is None:
            return Strings(np.zeros(0, np.uint8), np.zeros(len(self), np.int64))
        return self._attributes

    def _first_repeated(self) -> str | None:
        """Return the name, of those that occur twice, whose second occurrence comes first."""
        equal = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        seen: dict[str, int] = {}
        repeated: list[int] = []
        for class_id in np.unique(self._by_hash[np.concatenate([equal, equal + 1])]).tolist():
            if self.names[class_id] in seen:
                repeated.append(class_id)
            seen.setdefault(self.names[class_id], class_id)
        return self.names[min(repeated)] if repeated else None


_MAX_FOUND = 1 << 16  # names whose lookups are kept
_TYPES = {
    "names": np.uint8,
    "name_ends": np.int64,
    "name_hashes": np.uint64,
    "ids_by_hash": np.int32,
    "attributes": np.uint8,
    "attribute_ends": np.int64,
}
