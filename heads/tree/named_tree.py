"""A label tree with names, and its file format.

A tree file is a safetensors file. Its tensors are the arrays of the tree, and the names of classes
and pseudoclasses as UTF-8 bytes and the end of each name; its metadata contains digests.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from heads.tree.cover import CoverTree
from heads.tree.label_tree import LabelTree

_FORMAT = "kway label tree 3"
_NAMES = ("classes", "pseudoclasses")
_ARRAYS = ("parent", "class_of_node")

Positions = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.integer]]


@dataclass(frozen=True, eq=False)
class NamedTree:
    """A label tree with class names (`classes` [K]) and names of the other nodes in node order
    (`pseudoclasses`)."""

    tree: LabelTree
    classes: tuple[str, ...]
    pseudoclasses: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.classes) != self.tree.num_classes:
            raise ValueError(
                f"the label tree has {self.tree.num_classes} classes, but {len(self.classes)} "
                "class names: pass one name per class"
            )
        if len(self.pseudoclasses) != self.tree.num_nodes - self.tree.num_classes:
            raise ValueError(
                f"the label tree has {self.tree.num_nodes - self.tree.num_classes} pseudoclasses, "
                f"but {len(self.pseudoclasses)} names for them: pass one name per pseudoclass"
            )
        twice = [name for name, count in Counter(self.classes).items() if count > 1]
        if twice:
            raise ValueError(
                f"class {twice[0]!r} is in the class list twice: make the names unique"
            )

    @classmethod
    def of_cover_tree(
        cls, cover: CoverTree, classes: Sequence[str], kind: Literal["utree", "vtree"]
    ) -> "NamedTree":
        """Return the utree or vtree of a cover tree, according to `kind`.

        A pseudoclass gets the name of the class at its center. Raises ValueError if the number of
        names differs from the number of classes.
        """
        if kind == "utree" or len(classes) != len(cover.level):
            return cls(cover.utree(), tuple(classes), ())
        centers = cover.pseudoclass_centers()
        return cls(cover.vtree(), tuple(classes), tuple(classes[center] for center in centers))

    def save(self, path: str | Path) -> None:
        """Write the tree file atomically: to a temporary file, which is then renamed."""
        path = Path(path)
        names = _columns({"classes": self.classes, "pseudoclasses": self.pseudoclasses})
        metadata = {"format": _FORMAT, "digest": self.tree.digest(), "names": _digest(names)}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        temporary.write_bytes(save({**self.tree.arrays(), **names}, metadata))
        temporary.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "NamedTree":
        """Read a tree file.

        Raises FileNotFoundError if the file does not exist, and ValueError if it is damaged or is
        not a tree file.
        """
        tree, names = _read(Path(path))
        strings = []
        for key in _NAMES:
            text, start, found = names[key].tobytes(), 0, []
            for end in names[f"{key}_ends"].tolist():
                found.append(str(text[start:end], "utf-8"))
                start = end
            strings.append(tuple(found))
        return cls(tree, *strings)


def load_tree(path: Path, num_classes: int, positions: Positions | None) -> LabelTree:
    """Read the tree of a file, with the classes numbered as in the data.

    `positions` receives the names of the tree's classes as a column, the UTF-8 bytes of all names
    and the end of each, and returns the position [K] of each class of the data among them, or -1.
    If it is None, the numbers in the file are used. Raises the errors of `NamedTree.load`, and
    ValueError if the classes of the tree are not those of the data.
    """
    tree, names = _read(path)
    if tree.num_classes != num_classes:
        raise ValueError(
            f"tree {path} has {tree.num_classes} classes, but the data have {num_classes}: build "
            "the tree from the data's class list"
        )
    if positions is None:
        return tree
    of_data = positions(names["classes"], names["classes_ends"])
    absent = np.flatnonzero(of_data < 0)
    if absent.size:
        raise ValueError(
            f"tree {path} does not contain {absent.size} classes of the data, such as class "
            f"{absent[0]}: build the tree from the data's class list"
        )
    if (of_data == np.arange(num_classes)).all():
        return tree
    renumbered = np.empty(num_classes, np.int64)
    renumbered[of_data] = np.arange(num_classes)
    given = tree.class_of_node
    return LabelTree.from_parents(tree.parent, np.where(given < 0, -1, renumbered[given]))


def _read(path: Path) -> tuple[LabelTree, dict[str, NDArray[Any]]]:
    """Return the tree of a file and the columns of names. Raises the errors of `NamedTree.load`."""
    if not path.is_file():
        raise FileNotFoundError(f"tree {path} does not exist: create it with kway tree build")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its metadata does not contain format={_FORMAT!r}")
        names = {key: arrays[key] for key in arrays.keys() - set(_ARRAYS)}
        tree = LabelTree.from_arrays(arrays)
        if (tree.digest(), _digest(names)) != (metadata["digest"], metadata["names"]):
            raise ValueError("a digest does not match")
    except (SafetensorError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} is not a valid tree file ({reason}): create it again with kway tree build"
        ) from None
    return tree, names


def _columns(names: Mapping[str, Sequence[str]]) -> dict[str, NDArray[Any]]:
    """Return the bytes of names and the end of each name, by the keys `…` and `…_ends`."""
    columns: dict[str, NDArray[Any]] = {}
    for key, listed in names.items():
        encoded = [name.encode() for name in listed]
        columns[key] = np.frombuffer(b"".join(encoded), np.uint8)
        columns[f"{key}_ends"] = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return columns


def _digest(names: Mapping[str, NDArray[Any]]) -> str:
    sha = hashlib.sha256()
    for key in sorted(names):
        sha.update(names[key].data)
    return sha.hexdigest()[:16]
