"""Label trees from an existing hierarchy: paths, a parent table, or WordNet.

Classes become leaves, and the names above them become pseudoclasses. Names that are not above any
class are omitted. If a name has several parents, only the first parent is used.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heads.tree.label_tree import IntArray, LabelTree, preorder
from heads.tree.named_tree import NamedTree


@dataclass(frozen=True)
class Hierarchy:
    """A hierarchy of names. `parents` contains the parents of every name, empty for a root.

    If a name has several parents, only the first parent is used. `titles` are display names, and
    `origin` is the name of the source in error messages.
    """

    origin: str
    parents: Mapping[str, tuple[str, ...]]
    titles: Mapping[str, str] = field(default_factory=dict)

    def leaves(self) -> list[str]:
        """Return the names without children, in order of first appearance."""
        inner = {parent for parents in self.parents.values() for parent in parents}
        return [name for name in self.parents if name not in inner]

    def num_with_several_parents(self) -> int:
        return sum(len(parents) > 1 for parents in self.parents.values())

    def tree(
        self,
        class_names: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        collapse: bool = True,
    ) -> NamedTree:
        """Return the label tree of the classes called `names` in the hierarchy (default:
        `class_names`).

        If other classes are below a class or have the same name in the hierarchy, the class becomes
        a leaf under a pseudoclass with that name. See `label_tree_of_paths` for `collapse`. Raises
        ValueError for a name that is not in the hierarchy, and for a cycle.
        """
        names = class_names if names is None else names
        above = self._above(class_names, names)
        inner = {parent for parent in above.values() if parent is not None}
        inner |= {name for name, count in Counter(names).items() if count > 1}
        paths = []
        for name in names:
            path = []
            at = name if name in inner else above[name]
            while at is not None:
                path.append(at)
                at = above[at]
            paths.append(path[::-1])
        tree, above_classes = label_tree_of_paths(paths, np.arange(len(paths)), collapse=collapse)
        shown = tuple(self.titles.get(name, name) for name in above_classes)
        return NamedTree(tree, tuple(class_names), shown)

    def _above(self, class_names: Sequence[str], names: Sequence[str]) -> dict[str, str | None]:
        """Return the parent of every name at or above a class."""
        above: dict[str, str | None] = {}
        for class_name, name in zip(class_names, names, strict=True):
            if name not in self.parents:
                raise ValueError(
                    f"class {class_name!r} is not in {self.origin}: add it, or correct its name"
                )
            path: set[str] = set()
            at: str | None = name
            while at is not None and at not in above:
                path.add(at)
                up = next(iter(self.parents[at]), None)
                if up in path:
                    raise ValueError(
                        f"{self.origin} has a cycle: {up!r} is both above and below {at!r}; "
                        "remove one of these relations"
                    )
                above[at] = up
                at = up
        return above


def label_tree_of_paths(
    paths: Sequence[Sequence[str]], path_of_class: NDArray[np.integer], *, collapse: bool = True
) -> tuple[LabelTree, tuple[str, ...]]:
    """Return a label tree, and the names of its pseudoclasses in node order.

    Class i is a leaf under the nodes of `paths[path_of_class[i]]`, which starts at a root. A node
    is identified by its name and the names above it, so the same name may occur in several
    branches. `collapse` removes pseudoclasses with a single child, which do not group anything.
    """
    num_classes = len(path_of_class)
    number: dict[tuple[int, str], int] = {}  # (number of the parent, name) -> number of the node
    above: list[int] = []
    ends = []
    for path in paths:
        at = -1
        for name in path:
            key = (at, name)
            if key not in number:
                number[key] = num_classes + len(number)
                above.append(at)
            at = number[key]
        ends.append(at)
    parents = np.concatenate([np.array(ends, np.int64)[path_of_class], np.array(above, np.int64)])
    names = [name for _, name in number]
    if collapse:
        parents, kept = _collapsed(parents, num_classes)
        names = [name for name, keep in zip(names, kept, strict=True) if keep]
    classes = np.append(np.arange(num_classes), np.full(len(names), -1))
    walk = preorder(parents)
    ordered = tuple(names[node - num_classes] for node in walk[walk >= num_classes].tolist())
    return LabelTree.from_parents(parents, classes), ordered


def read_parent_table(path: str | Path) -> Hierarchy:
    """Read a hierarchy from a table of `child,parent` rows: CSV, or tab-separated for .tsv.

    An optional header with `child` and `parent` sets the order of the columns. A child without a
    parent is a root, and so is a parent that is not listed as a child in any row. If a child has
    several rows, its first parent is used. Raises FileNotFoundError if the file does not exist, and
    ValueError with the line number if a row is invalid.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"parent table {path} does not exist: pass the path of a CSV or TSV file"
        )
    parents: dict[str, list[str]] = {}
    child_column, parent_column = 0, 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        for line, row in enumerate(rows, 1):
            cells = [cell.strip() for cell in row]
            lower = [cell.casefold() for cell in cells]
            if line == 1 and {"child", "parent"} <= set(lower):
                child_column, parent_column = lower.index("child"), lower.index("parent")
                continue
            if not any(cells):
                continue
            if len(cells) <= max(child_column, parent_column) or not cells[child_column]:
                raise ValueError(
                    f"{path}, line {line} is invalid: write `child,parent`, or `child,` for a root"
                )
            child, parent = cells[child_column], cells[parent_column]
            listed = parents.setdefault(child, [])
            if parent:
                parents.setdefault(parent, [])
                listed += [parent] if parent not in listed else []
    if not parents:
        raise ValueError(f"{path} is empty: write `child,parent` rows")
    return Hierarchy(str(path), {name: tuple(listed) for name, listed in parents.items()})


def _collapsed(parents: IntArray, num_classes: int) -> tuple[IntArray, list[bool]]:
    """Return the parents after removing pseudoclasses with a single child, and whether each
    pseudoclass was kept."""
    children = np.bincount(parents[parents >= 0], minlength=len(parents))
    kept = children != 1
    kept[:num_classes] = True
    up = parents.copy()
    while (skip := (up >= 0) & ~kept[up]).any():
        up[skip] = parents[up[skip]]
    renumber = np.cumsum(kept) - 1
    up = np.where(up < 0, -1, renumber[up])
    return up[kept], kept[num_classes:].tolist()
