"""Draw a label tree with names, as an indented outline. If the tree is large, only its upper levels
are drawn.

Branches are expanded from the root down, those with the most classes first, as long as their
children fit. A collapsed branch shows its number of classes.
"""

import heapq
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from heads.tree.named_tree import NamedTree

_ROW_INCHES, _INDENT_INCHES, _MARGIN_INCHES, _WIDTH_INCHES = 0.2, 0.25, 0.15, 8.0
_LONGEST_NAME = 60
_MOST_CHILDREN = 16
_INNER, _CLASS, _MORE, _EDGE = "#1d6aa3", "#1f2933", "#52606d", "#9aa5b1"


@dataclass
class _Item:
    """A pseudoclass, a class, or the number of children that are not drawn."""

    text: str
    color: str
    depth: int
    below: list["_Item"] = field(default_factory=list)


def draw_tree(named: NamedTree, path: str | Path, *, rows: int = 48, title: str = "") -> int:
    """Write a figure with at most about `rows` rows of names. The suffix of `path` sets its format.

    Returns the number of classes and pseudoclasses drawn.
    """
    from matplotlib.figure import Figure

    items = list(_in_order(_expanded(named, rows)))
    height = _ROW_INCHES * (len(items) + 1) + 2 * _MARGIN_INCHES
    deepest = max(item.depth for item in items)
    figure = Figure(figsize=(max(_WIDTH_INCHES, _INDENT_INCHES * deepest + 5), height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_MARGIN_INCHES, figure.get_figwidth() - _MARGIN_INCHES)
    axes.set_ylim(len(items) - 0.3, -1.8)
    axes.axis("off")
    title = title or f"{named.tree.num_classes:,} classes"
    axes.text(0, -1.2, title, fontsize=11, verticalalignment="center", parse_math=False)
    row_of = {id(item): row for row, item in enumerate(items)}
    for row, item in enumerate(items):
        x = _INDENT_INCHES * item.depth
        for child in item.below:
            y = row_of[id(child)]
            axes.plot([x + 0.05] * 2 + [x + 0.2], [row + 0.35, y, y], color=_EDGE, linewidth=0.8)
        weight = "bold" if item.color == _INNER else "normal"
        axes.text(
            x,
            row,
            item.text,
            color=item.color,
            fontsize=8,
            fontweight=weight,
            verticalalignment="center",
            parse_math=False,
        )
    figure.savefig(path, dpi=110)
    return sum(item.color != _MORE for item in items)


def _expanded(named: NamedTree, rows: int) -> list[_Item]:
    """Return the items of the roots, with those of their branches as long as rows are left."""
    tree, names, num_below = named.tree, named.node_names, named.tree.num_classes_below
    by_parent = np.argsort(tree.parent, kind="stable")
    starts = np.searchsorted(tree.parent[by_parent], np.arange(-1, tree.num_nodes + 1))
    queue: list[tuple[int, int, _Item]] = []

    def children(parent: int, depth: int, most: int) -> list[_Item]:
        """The items of a node's children, or of the largest ones and a count of the rest."""
        nodes = by_parent[starts[parent + 1] : starts[parent + 2]]
        nodes = nodes[np.argsort(-num_below[nodes], kind="stable")]
        shown = nodes if len(nodes) <= most else nodes[: most - 1]
        items = []
        for node in shown.tolist():
            name, size = _drawable(names[node]), int(num_below[node])
            if tree.has_children[node]:
                item = _Item(f"{name} ({size:,} classes)", _INNER, depth)
                heapq.heappush(queue, (-size, node, item))
            else:
                item = _Item(name, _CLASS, depth)
            items.append(item)
        if len(shown) < len(nodes):
            items.append(_Item(f"… {len(nodes) - len(shown):,} more", _MORE, depth))
        return items

    top = children(-1, 0, rows)
    rows -= len(top)
    while queue:
        _, node, item = heapq.heappop(queue)
        # Do not show fewer than 3 of a node's children.
        if rows >= min(3, int(tree.num_children[node])):
            item.below = children(node, item.depth + 1, min(rows, _MOST_CHILDREN))
            rows -= len(item.below)
    return top


def _in_order(items: list[_Item]) -> list[_Item]:
    """Return the items and those below them, in the order of the rows."""
    return [each for item in items for each in (item, *_in_order(item.below))]


def _drawable(name: str) -> str:
    """Return the name, truncated if it is long. Characters that the font lacks, such as emoji, are
    replaced by their names."""
    import emoji
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    if not all(ord(character) in known for character in name):
        name = emoji.demojize(name, delimiters=("", " ")).replace("_", " ")
        name = "".join(
            character
            if ord(character) in known
            else unicodedata.name(character, f"U+{ord(character):04X}").lower() + " "
            for character in name
        ).strip()
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
