"""Draw a label tree with names. If the tree is large, only the upper levels are drawn.

Branches are expanded from the root down, those with the most classes first, as long as their
children fit. A collapsed branch shows its number of classes.
"""

import heapq
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from heads.tree.label_tree import IntArray, LabelTree
from heads.tree.named_tree import NamedTree

_COLORS = {"expanded": "#1d6aa3", "class": "#1f2933", "collapsed": "#1d6aa3", "more": "#52606d"}
_EDGE = "#9aa5b1"
# Sizes in inches.
_ROW_INCHES, _MARGIN, _CONNECTOR, _TITLE_INCHES = 0.24, 0.15, 0.35, 0.45
_MAX_WIDTH = 30.0
_MAX_NAME_CHARACTERS = (60, 40, 26)  # the first limit that makes the figure narrow enough is used
_MAX_CHILDREN = 16
_FONT_SIZE, _TITLE_SIZE = 8, 11
_TEXT_OFFSET = 0.08


@dataclass
class _Item:
    """A pseudoclass (expanded or collapsed), a class, or the number of children not drawn."""

    kind: str
    name: str
    depth: int
    note: str = ""
    below: list["_Item"] = field(default_factory=list)
    row: float = 0.0

    def text(self, max_characters: int) -> str:
        """The name, truncated if it is too long, and the note."""
        return f"{_short(self.name, max_characters)}{self.note}"


def draw_tree(named: NamedTree, path: str | Path, *, rows: int = 48, title: str = "") -> int:
    """Write a figure with at most about `rows` rows of names. The suffix of `path` sets its format.

    Returns the number of classes and pseudoclasses drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    items = _placed(_Expansion(named, rows).items())
    num_rows = 1 + max(item.row for item in items)
    title = title or f"{named.tree.num_classes:,} classes"
    for max_characters in _MAX_NAME_CHARACTERS:
        columns = _columns(items, max_characters)
        if columns[-1] <= _MAX_WIDTH:
            break
    else:  # a very deep tree: names overlap, but the figure stays within the limit
        columns = [_MAX_WIDTH / columns[-1] * x for x in columns]
    columns[-1] = max(columns[-1], _text_width(title, _TITLE_SIZE) + 2 * _MARGIN)
    height = _TITLE_INCHES + _ROW_INCHES * num_rows + _MARGIN
    figure = Figure(figsize=(columns[-1], height))
    axes = figure.add_axes((0, 0, 1, 1))
    for item in items:
        _draw(axes, item, columns, max_characters)
    top = 0.5 + _TITLE_INCHES / _ROW_INCHES
    axes.set_xlim(0, columns[-1])
    axes.set_ylim(num_rows - 0.5 + _MARGIN / _ROW_INCHES, -top)
    axes.axis("off")
    axes.text(
        _MARGIN, 0.4 - top, title, fontsize=_TITLE_SIZE, verticalalignment="top", parse_math=False
    )
    figure.savefig(path, dpi=110)
    return sum(item.kind != "more" for item in items)


def _columns(items: list[_Item], max_characters: int) -> list[float]:
    """The x position of each depth, in inches, and the width of the figure.

    A column is as wide as its widest expanded name; the last column is as wide as its widest name.
    """
    deepest = max(item.depth for item in items)
    columns = [_MARGIN]
    for depth in range(deepest + 1):
        expanded = [item for item in items if item.depth == depth and item.below]
        widths = (_item_width(item, max_characters) for item in expanded)
        columns.append(columns[-1] + max(widths, default=0.0) + _CONNECTOR)
    ends = (columns[item.depth] + _item_width(item, max_characters) for item in items)
    columns[-1] = max(ends) + _MARGIN
    return columns


def _item_width(item: _Item, max_characters: int) -> float:
    return _TEXT_OFFSET + _text_width(item.text(max_characters), _FONT_SIZE, _weight(item))


def _text_width(text: str, size: int, weight: str = "normal") -> float:
    """The width of a text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def _weight(item: _Item) -> str:
    return "bold" if item.kind in ("expanded", "collapsed") else "normal"


class _Expansion:
    """Expands branches of a tree as long as rows are left."""

    def __init__(self, named: NamedTree, rows: int) -> None:
        self._tree, self._names, self._rows = named.tree, named.node_names, rows
        self._num_below = _classes_below(named.tree)
        self._by_parent = np.argsort(named.tree.parent, kind="stable")
        sorted_parents = named.tree.parent[self._by_parent]
        self._starts = np.searchsorted(sorted_parents, np.arange(-1, named.tree.num_nodes + 1))
        self._queue: list[tuple[int, int, _Item]] = []

    def items(self) -> list[_Item]:
        """The items of the roots. The branch with the most classes is expanded first."""
        top = self._children(-1, 0, self._rows)
        self._rows -= len(top)
        while self._queue:
            _, node, item = heapq.heappop(self._queue)
            # Expanding an item frees its row. Do not show fewer than 3 of its children.
            if self._rows + 1 >= min(3, int(self._tree.num_children[node])):
                item.kind, item.note = "expanded", ""
                max_items = min(self._rows + 1, _MAX_CHILDREN)
                item.below = self._children(node, item.depth + 1, max_items)
                self._rows -= len(item.below) - 1
        return top

    def _children(self, parent: int, depth: int, max_items: int) -> list[_Item]:
        """The items of a node's children, or of the largest ones and a count of the rest."""
        nodes = self._by_parent[self._starts[parent + 1] : self._starts[parent + 2]]
        nodes = nodes[np.argsort(-self._num_below[nodes], kind="stable")]
        shown = nodes if len(nodes) <= max_items else nodes[: max_items - 1]
        items = [self._collapsed(node, depth) for node in shown.tolist()]
        if len(shown) < len(nodes):
            items.append(_Item("more", f"… {len(nodes) - len(shown):,} more", depth))
        return items

    def _collapsed(self, node: int, depth: int) -> _Item:
        name = _drawable(self._names[node])
        if not self._tree.has_children[node]:
            return _Item("class", name, depth)
        size = int(self._num_below[node])
        item = _Item("collapsed", name, depth, f" ({size:,} classes)")
        heapq.heappush(self._queue, (-size, node, item))
        return item


def _short(name: str, max_characters: int) -> str:
    return name if len(name) <= max_characters else name[: max_characters - 1] + "…"


def _drawable(name: str) -> str:
    """The name, with emoji and other characters that the font lacks replaced by their names."""
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


def _placed(top: list[_Item]) -> list[_Item]:
    """All items with their rows: items without children in sequence, the others centered on their
    children."""
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


def _draw(axes: Any, item: _Item, columns: list[float], max_characters: int) -> None:
    color, x = _COLORS[item.kind], columns[item.depth]
    for child in item.below:
        end = columns[child.depth]
        bend = end - 0.6 * _CONNECTOR
        axes.plot(
            [x, bend, bend, end],
            [item.row, item.row, child.row, child.row],
            color=_EDGE,
            linewidth=0.8,
            zorder=1,
        )
    if item.kind == "expanded":
        axes.plot(x, item.row, "o", color=color, markersize=4, zorder=3)
    axes.text(
        x + (_TEXT_OFFSET if item.kind == "expanded" else 0.03),
        item.row,
        item.text(max_characters),
        color=color,
        fontsize=_FONT_SIZE,
        fontweight=_weight(item),
        fontstyle="italic" if item.kind == "more" else "normal",
        verticalalignment="center",
        parse_math=False,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        zorder=2,
    )
