"""The class hierarchy of a manifest, stored in the `path` attribute of each class.

A path contains the names of the nodes above a class, from the root down, joined by SEPARATOR. A
node is identified by its name and the names above it. The heads build label trees from the paths.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data.classes.class_list import PATH
from data.shards.manifest import Manifest

SEPARATOR = " > "
MAX_DEPTH = 100  # the maximum depth of nouns in WordNet is 19
MAX_NAME = 1000  # characters

ClassPath = tuple[str, ...]


def join_path(names: Sequence[str]) -> str:
    """Join names to form a `path` attribute. Raises ValueError for invalid names or too many
    names.
    """
    joined = SEPARATOR.join(names)
    if reason := _mistake(names):
        raise ValueError(f"path {joined[:100]!r}: {reason}: rename or move it")
    if joined.split(SEPARATOR) != list(names):
        raise ValueError(f"path {joined[:100]!r} has a name that contains {SEPARATOR!r}: rename it")
    return joined


class ClassPaths(NamedTuple):
    """The names above each class, from the root down: class i is below `distinct[of_class[i]]`."""

    distinct: list[ClassPath]
    of_class: NDArray[np.int32]


def class_paths(folder: Path | str, manifest: Manifest) -> ClassPaths:
    """Return the names above each class. The path of a class without a path is empty.

    Raises ValueError, with the name of a class, if its path is too long or contains a name twice.
    Also raises ValueError if none of the classes has a path.
    """
    paths, of_class = manifest.classes.paths()
    distinct: list[ClassPath] = [tuple(path.split(SEPARATOR)) for path in paths]
    if not any(distinct):
        raise ValueError(
            f"{folder}: source {manifest.source.kind} does not provide a hierarchy: build the tree "
            "from label vectors, or pass --classes with a WordNet dict folder or a parent table"
        )
    for number, path in enumerate(distinct):
        if reason := _mistake(path):
            name = manifest.class_names[int(np.argmax(of_class == number))]
            raise ValueError(
                f"{folder}: {PATH} of class {name[:100]!r}: {reason}: correct its source and run "
                "kway shard again"
            )
    return ClassPaths([*distinct, ()], np.where(of_class < 0, len(distinct), of_class))


def _mistake(names: Sequence[str]) -> str | None:
    """Return the reason why a path is invalid, or None."""
    if len(names) > MAX_DEPTH:
        return f"{len(names):,} names, over the limit of {MAX_DEPTH}"
    if not names or not all(map(str.strip, names)):
        return "a name is empty"
    if long := next((name for name in names if len(name) > MAX_NAME), None):
        return f"{long[:40]!r}… has {len(long):,} characters, over the limit of {MAX_NAME:,}"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"{twice[:100]!r} is its own ancestor"
    return None
