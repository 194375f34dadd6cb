"""Label vectors from a file, which are matched to classes by name.

The caller supplies the function that reads the file and looks up names.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data.classes.class_list import ClassInfo
from data.sources.records import digest
from data.text.emoji_classes import emoji_spellings

# (file, names) -> (vectors for the names found, float32 [N, D]; names without a vector).
Find = Callable[[Path, Sequence[str]], tuple[np.ndarray, list[str]]]

_SHOWN = 10


class VectorFile:
    """Label vectors in a file. Raises FileNotFoundError if it does not exist.

    notes: a line that lists the classes without a vector, if `of` found any.
    """

    def __init__(self, file: Path, find: Find) -> None:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist: pass a file of label vectors")
        self._file, self._find = file, find
        self._found: np.ndarray | None = None
        self.notes: list[str] = []

    def digest(self) -> str:
        return digest([self._file])

    def of(self, classes: Sequence[ClassInfo]) -> np.ndarray:
        """Return one vector per class, float32 [K, D]. The file is read once.

        A class is looked up by its emoji or its `words`, and then by its name. Classes without a
        vector get the mean of the other vectors.
        """
        if self._found is not None:
            return self._found
        names = [_names(info) for info in classes]
        flat = list(dict.fromkeys(name for those in names for name in those))
        vectors, without = self._find(self._file, flat)
        row = {name: i for i, name in enumerate(flat)}
        for name in without:
            del row[name]
        rows = [next((row[name] for name in those if name in row), None) for those in names]
        mean = vectors[[i for i in rows if i is not None]].mean(axis=0)
        if missing := [those[0] for those, i in zip(names, rows, strict=True) if i is None]:
            shown = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
            self.notes = [f"{len(missing):,} classes without a vector use the mean: {shown}"]
        self._found = np.stack([mean if i is None else vectors[i] for i in rows])
        return self._found


def _names(info: ClassInfo) -> list[str]:
    """Return the names by which a class is looked up, best first."""
    if one := info.attributes.get("emoji"):
        return [*emoji_spellings(one), info.name]
    words = info.attributes.get("words")
    return [*words.split(", "), info.name] if words else [info.name]
