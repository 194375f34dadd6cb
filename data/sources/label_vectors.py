"""Adds label vectors from a file to a source. They are matched by class name.

The caller supplies the function that reads the file and looks up names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.classes.class_list import ClassInfo
from data.shards.manifest import SourceInfo
from data.skipped import Skipped
from data.sources.records import digest
from data.sources.source import Modality, Sample, Source
from data.text.emoji_classes import emoji_spellings

# (file, names) -> (vectors for the names found, float32 [N, D]; names without a vector).
Find = Callable[[Path, Sequence[str]], tuple[np.ndarray, list[str]]]

_SHOWN = 10


@dataclass(frozen=True)
class WithLabelVectors(Source):
    """`source` with label vectors from `file`.

    A class is looked up by its emoji or its `words`, and then by its name. Classes without a vector
    get the mean of the other vectors.
    """

    source: Source
    file: Path
    find: Find = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.file.is_file():
            raise FileNotFoundError(f"{self.file} does not exist: pass a file of label vectors")

    @property
    def modality(self) -> Modality:  # type: ignore[override]
        return self.source.modality

    def describe(self) -> SourceInfo:
        about = self.source.describe()
        parameters = {**about.parameters, "vectors": digest([self.file])}
        return SourceInfo(kind=about.kind, parameters=parameters)

    def classes(self) -> Sequence[ClassInfo]:
        return self.source.classes()

    def label_vectors(self) -> np.ndarray:
        return self._found[0]

    def splits(self) -> dict[str, Sequence[Any]]:
        return self.source.splits()

    def render(self, task: Any) -> Sample | Skipped:
        return self.source.render(task)

    def notes(self) -> list[str]:
        """Return a line that lists the classes without a vector, if there are any."""
        missing = self._found[1]
        if not missing:
            return []
        shown = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
        return [f"{len(missing):,} classes without a vector use the mean: {shown}"]

    @cached_property
    def _found(self) -> tuple[np.ndarray, list[str]]:
        """Return the vectors [K, D] and the classes that use the mean."""
        names = [_names(info) for info in self.classes()]
        flat = list(dict.fromkeys(name for those in names for name in those))
        vectors, without = self.find(self.file, flat)
        row = {name: i for i, name in enumerate(flat)}
        for name in without:
            del row[name]
        rows = [next((row[name] for name in those if name in row), None) for those in names]
        mean = vectors[[i for i in rows if i is not None]].mean(axis=0)
        missing = [those[0] for those, i in zip(names, rows, strict=True) if i is None]
        return np.stack([mean if i is None else vectors[i] for i in rows]), missing

    def __getstate__(self) -> dict[str, Any]:
        # Workers only render samples.
        return {"source": self.source}


def _names(info: ClassInfo) -> list[str]:
    """Return the names by which a class is looked up, best first."""
    if one := info.attributes.get("emoji"):
        return [*emoji_spellings(one), info.name]
    words = info.attributes.get("words")
    return [*words.split(", "), info.name] if words else [info.name]
