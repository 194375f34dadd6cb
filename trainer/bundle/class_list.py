"""The class list of a bundle. It stays on disk and opens immediately, regardless of the number of
classes.

classes.jsonl        {"name": …, "attributes": {…}}: one class per line, in order of ID
classes.safetensors  the end of each line, and the index of the names (`NameIndex`)
"""

import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.numpy import save_file

from data.shards.manifest import paused_gc
from trainer.bundle.class_names import ClassNames, NameIndex, index_names
from trainer.bundle.mapped_arrays import Shapes, mapped_arrays
from trainer.bundle.spec import INDEX, LINES, ClassEntry


@paused_gc()
def write_classes(folder: Path, entries: Iterable[ClassEntry]) -> int:
    """Write the files of the class list to `folder` and return the number of classes.

    Raises ValueError for a duplicate name or an empty list.
    """
    names, lengths = [], []
    with (folder / LINES).open("wb") as file:
        for entry in entries:
            line = entry.model_dump_json(exclude_defaults=True).encode() + b"\n"
            file.write(line)
            names.append(entry.name)
            lengths.append(len(line))
    if not names:
        raise ValueError("the class list is empty: a bundle needs at least one class")
    index = index_names(names)
    arrays: dict[str, NDArray[Any]] = {
        "line_ends": np.cumsum(lengths, dtype=np.int64),
        "folded_names": index.folded,
        "folded_ends": index.ends,
        "name_hashes": index.hashes,
        "ids_by_hash": index.by_hash,
    }
    save_file(arrays, folder / INDEX)
    return len(names)


class ClassList:
    """The classes of a bundle folder, read on demand."""

    def __init__(self, folder: Path, num_classes: int) -> None:
        """Raises ValueError if the files do not contain `num_classes` classes."""
        self.path = folder / LINES
        arrays = mapped_arrays(folder / INDEX, _shapes(num_classes))
        self._ends = arrays["line_ends"]
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size
        if self._size != self._ends[-1]:
            self.close()
            raise ValueError(f"{self.path} and {INDEX} do not match: copy the bundle again")
        index = NameIndex(
            arrays["folded_names"],
            arrays["folded_ends"],
            arrays["name_hashes"],
            arrays["ids_by_hash"],
        )
        self.names = ClassNames(_Names(self), index)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, class_id: int) -> ClassEntry:
        """Return the class with this ID. Raises IndexError if the ID is outside 0 … K - 1."""
        if not 0 <= class_id < len(self):
            raise IndexError(f"class ID {class_id} is out of range 0 … {len(self) - 1}")
        assert self._close.alive, "the file is closed"
        start, end = int(self._ends[class_id - 1]) if class_id else 0, int(self._ends[class_id])
        # Without this check, a damaged index could cause a read of gigabytes or an OSError.
        is_inside = 0 <= start < end <= self._size
        line = os.pread(self._descriptor, end - start, start) if is_inside else b""
        try:
            return ClassEntry.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(
                f"{self.path}: line {class_id + 1} is not a valid class: copy the bundle again"
            ) from error

    def close(self) -> None:
        """Close the file. Classes must not be read afterwards."""
        self._close()


class _Names(Sequence[str]):
    """The names in a class list, as a sequence."""

    def __init__(self, classes: ClassList) -> None:
        self._classes = classes

    def __len__(self) -> int:
        return len(self._classes)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[index] for index in range(*position.indices(len(self)))]
        return self._classes[position].name


def _shapes(num_classes: int) -> Shapes:
    each: tuple[int | None, ...] = (num_classes,)
    return {
        "line_ends": (np.int64, each),
        "folded_names": (np.uint8, (None,)),
        "folded_ends": (np.int64, each),
        "name_hashes": (np.int64, each),
        "ids_by_hash": (np.int32, each),
    }
