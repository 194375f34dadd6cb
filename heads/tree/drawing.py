"""Draw a label tree with names, as far down from the root as it is readable.

Branches with the most classes are expanded first, until the rows of the figure are used up. A
collapsed branch shows its number of classes.
"""

import heapq
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from heads.tree.label_tree import IntArray, LabelTree
from heads.tree.named_tree import NamedTree

_COLORS = {"inner": "#2680c2", "class": "#1f2933", "closed": "#2680c2", "more": "#7b8794"}
_EDGE = "#9aa5b1"
_ROW_INCHES = 0.24
_NAME_CHARACTERS = 26
_LARGEST_FAMILY = 16


@dataclass
class _Item:
    """An item of the figure: an open or closed pseudoclass, a class, or the rest of a family."""

    kind: str
    text: str
    depth: int
    below: list["_Item"] = field(default_factory=list)
    row: float = 0.0


def draw_tree(named: NamedTree, path: str | Path, *, rows: int = 48, title: str = "") -> int:
    """Write the figure to `path`, with at most about `rows` rows of names.

    The suffix of `path` determines the format. Returns the number of drawn classes and
    pseudoclasses.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    items = _with_rows(_Expansion(named, rows).items())
    deepest = max(item.depth for item in items)
    num_rows = 1 + max(item.row for item in items)
    size = (min(30.0, 4 + 1.7 * (deepest + 1)), _ROW_INCHES * num_rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for item in items:
        _draw(axes, item)
    axes.set_title(title or f"{named.tree.num_classes:,} classes", loc="left", fontsize=11)
    axes.set_xlim(-0.05, deepest + 1.4)
    axes.set_ylim(num_rows - 0.4, -0.6)
    axes.axis("off")
    figure.savefig(path, dpi=110)
    return sum(item.kind != "more" for item in items)


class _Expansion:
    """Expands branches of a tree until all rows are used."""

    def __init__(self, named: NamedTree, rows: int) -> None:
        self._tree, self._names, self._rows = named.tree, named.node_names, rows
        self._num_below = _classes_below(named.tree)
        self._by_parent = np.argsort(named.tree.parent, kind="stable")
        sorted_parents = named.tree.parent[self._by_parent]
        self._starts = np.searchsorted(sorted_parents, np.arange(-1, named.tree.num_nodes + 1))
        self._queue: list[tuple[int, int, _Item]] = []

    def items(self) -> list[_Item]:
        """Return the items of the roots, with their branches expanded, largest first."""
        top = self._family(-1, 0, self._rows)
        self._rows -= len(top)
        while self._queue:
            _, node, item = heapq.heappop(self._queue)
            # The row of the closed item becomes free. Fewer than 3 names are not informative.
            if self._rows + 1 >= min(3, int(self._tree.num_children[node])):
                item.kind, item.text = "inner", _short(self._names[node])
                max_rows = min(self._rows + 1, _LARGEST_FAMILY)
                item.below = self._family(node, item.depth + 1, max_rows)
                self._rows -= len(item.below) - 1
        return top

    def _family(self, parent: int, depth: int, max_rows: int) -> list[_Item]:
        """Return items for a node's children, or for the largest and the number of the others."""
        nodes = self._by_parent[self._starts[parent + 1] : self._starts[parent + 2]]
        nodes = nodes[np.argsort(-self._num_below[nodes], kind="stable")]
        shown = nodes if len(nodes) <= max_rows else nodes[: max_rows - 1]
        items = [self._closed(node, depth) for node in shown.tolist()]
        if len(shown) < len(nodes):
            items.append(_Item("more", f"… {len(nodes) - len(shown):,} more", depth))
        return items

    def _closed(self, node: int, depth: int) -> _Item:
        name = _short(self._names[node])
        if not self._tree.has_children[node]:
            return _Item("class", name, depth)
        size = int(self._num_below[node])
        item = _Item("closed", f"{name} ({size:,} classes)", depth)
        heapq.heappush(self._queue, (-size, node, item))
        return item


def _short(name: str) -> str:
    name = _drawable(name)
    return name if len(name) <= _NAME_CHARACTERS else name[: _NAME_CHARACTERS - 1] + "…"


def _drawable(name: str) -> str:
    """Replace emoji and other characters that are missing in the font by their Unicode names."""
    import emoji
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    if all(ord(character) in known for character in name):
        return name
    words = emoji.demojize(name, delimiters=("", " ")).replace("_", " ")
    return "".join(
        character
        if ord(character) in known
        else unicodedata.name(character, f"U+{ord(character):04X}").lower() + " "
        for character in words
    ).strip()


def _classes_below(tree: LabelTree) -> IntArray:
    """Return the number of classes [N] at or below each node."""
    counts = (tree.class_of_node >= 0).astype(np.int64)
    by_depth = np.argsort(tree.depth, kind="stable")
    ends = np.cumsum(np.bincount(tree.depth))
    for start, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
        nodes = by_depth[start:end]
        np.add.at(counts, tree.parent[nodes], counts[nodes])
    return counts


def _with_rows(top: list[_Item]) -> list[_Item]:
    """Return all items with rows assigned: leaves in order, parents centered on their children."""
    items: list[_Item] = []
    next_row = 0

    def visit(item: _Item) -> None:
        nonlocal next_row
        for child in item.below:
            visit(child)
        if item.below:
            item.row = (item.below[0].row + item.below[-1].row) / 2
        else:
            item.row = next_row
            next_row += 1
        items.append(item)

    for item in top:
        visit(item)
    return items


def _draw(axes: Any, item: _Item) -> None:
    color = _COLORS[item.kind]
    for child in item.below:
        bend = item.depth + 0.82
        axes.plot(
            [item.depth, bend, bend, child.depth],
            [item.row, item.row, child.row, child.row],
            color=_EDGE,
            linewidth=0.8,
            zorder=1,
        )
    if item.kind == "inner":
        axes.plot(item.depth, item.row, "o", color=color, markersize=4, zorder=3)
    axes.text(
        item.depth + (0.05 if item.kind == "inner" else 0.02),
        item.row,
        item.text,
        color=color,
        fontsize=8,
        fontweight="bold" if item.kind in ("inner", "closed") else "normal",
        fontstyle="italic" if item.kind == "more" else "normal",
        verticalalignment="center",
        parse_math=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=2,
    )
