"""A label tree with names, and its file format.

A tree file is a safetensors file. Its tensors are the arrays of the tree, and the names of classes
and pseudoclasses as JSON; its metadata contains a digest.
"""

import hashlib
import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from heads.tree.cover import CoverTree
from heads.tree.label_tree import LabelTree

_FORMAT = "kway label tree 2"
_EARLIER_FORMAT = "kway label tree 1"  # the names are in the metadata
_NAMES = ("classes", "pseudoclasses")
_ARRAYS = ("parent", "class_of_node")


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

    def for_classes(self, names: Sequence[str]) -> LabelTree:
        """Return the same tree with the classes numbered as in `names`.

        Raises ValueError if `names` are not the classes of the tree.
        """
        if len(names) == len(self.classes) and all(map(operator.eq, self.classes, names)):
            return self.tree
        number = {name: i for i, name in enumerate(names)}
        only_in_tree = [name for name in self.classes if name not in number]
        only_in_data = number.keys() - set(self.classes)
        if only_in_tree or only_in_data:
            name, where = (min(only_in_data), "data") if only_in_data else (only_in_tree[0], "tree")
            raise ValueError(
                f"the tree has {len(self.classes)} classes, the data have {len(names)}, and "
                f"{name!r} is only in the {where}: build the tree from the data's class list"
            )
        renumber = np.array([number[name] for name in self.classes], np.int64)
        given = self.tree.class_of_node
        classes = np.where(given < 0, -1, renumber[given])
        return LabelTree.from_parents(self.tree.parent, classes)

    def save(self, path: str | Path) -> None:
        """Write the tree file atomically: to a temporary file, which is then renamed."""
        path = Path(path)
        # The metadata of a safetensors file, unlike an array, has at most 100 MB.
        names = {
            key: np.frombuffer(json.dumps(value, ensure_ascii=False).encode(), np.uint8)
            for key, value in (("classes", self.classes), ("pseudoclasses", self.pseudoclasses))
        }
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
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"tree {path} does not exist: create it with kway tree build")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") not in (_FORMAT, _EARLIER_FORMAT):
                    raise ValueError(f"its metadata does not contain format={_FORMAT!r}")
                if metadata["format"] == _FORMAT:
                    names = {key: file.get_tensor(key) for key in _NAMES}
                    if _digest(names) != metadata["names"]:
                        raise ValueError("the digest of its names does not match")
                    metadata |= {key: str(text.tobytes(), "utf-8") for key, text in names.items()}
                tree = LabelTree.from_arrays({key: file.get_tensor(key) for key in _ARRAYS})
            if tree.digest() != metadata["digest"]:
                raise ValueError("its digest does not match")
            return cls(tree, *(_names(metadata[key]) for key in _NAMES))
        except (SafetensorError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path} is not a valid tree file ({reason}): create it again with kway tree build"
            ) from None


def _digest(names: Mapping[str, NDArray[np.uint8]]) -> str:
    return hashlib.sha256(b"\0".join(names[key].tobytes() for key in _NAMES)).hexdigest()[:16]


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("its names are not a list of strings")
    return tuple(names)
