"""Tree weights: node vectors in pre-order, their shards, the boundary, and a class row as a sum."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from docs.figures.diagram import cells
from docs.figures.look import GRAY, INK, RANKS, bare, new_figure
from heads import ClassHead, CrossEntropy, LabelTree
from heads.tree.label_tree import preorder
from heads.weights import shard_range

# The children of each inner node; names without children are classes.
_TREE = {
    "things": ("animals", "vehicles"),
    "animals": ("dogs", "cats"),
    "dogs": ("poodle", "beagle", "husky"),
    "cats": ("tabby", "siamese"),
    "vehicles": ("cars", "boats"),
    "cars": ("taxi", "jeep"),
    "boats": ("canoe", "ferry", "yacht"),
}
_DIM = 6
_STRIPS, _COLUMNS, _GAP = 9.0, 18.5, 3.6  # x of the rows of V, x and distance of rank columns
_SUM = 18.8  # y of the sum over a path


def draw() -> Figure:
    tree, names = _named_tree()
    head = ClassHead(_DIM, tree, CrossEntropy(), bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(5))
    figure = new_figure(6.5)
    ax = figure.subplots()
    _draw_tree(ax, tree, names)
    cells_of = head.weight.detach()
    for rank, color in enumerate(RANKS):
        start, stop = shard_range(tree.num_nodes, rank, len(RANKS))
        cells(ax, cells_of[start:stop], _STRIPS, start, edge=color)
        _draw_rank(ax, tree, rank)
    ax.text(_STRIPS + _DIM / 2, -0.5, "V, one row per node", ha="center", weight="bold")
    ax.text(_COLUMNS + _GAP, -1.6, "■ stored on the rank   □ gathered", ha="center")
    _draw_sum(ax, head, names, shard_range(tree.num_nodes, 2, len(RANKS))[0])
    ax.set(xlim=(-0.8, _COLUMNS + 3 * _GAP), ylim=(tree.num_nodes + 3.8, -2.4))
    bare(ax)
    return figure


def _named_tree() -> tuple[LabelTree, list[str]]:
    """The tree, and the names of its nodes in node order."""
    children = [name for family in _TREE.values() for name in family]
    classes = [name for name in children if name not in _TREE]
    given = [*classes, *_TREE]
    above = {child: parent for parent, family in _TREE.items() for child in family}
    parents = [given.index(above[name]) if name in above else -1 for name in given]
    class_of_node = [i if i < len(classes) else -1 for i in range(len(given))]
    tree = LabelTree.from_parents(parents, class_of_node)
    return tree, [given[node] for node in preorder(parents)]


def _draw_tree(ax: Axes, tree: LabelTree, names: list[str]) -> None:
    for node, name in enumerate(names):
        x, y = 1.5 * tree.depth[node], node + 0.5
        parent = tree.parent[node]
        if parent >= 0:
            bend = x - 1.1
            ax.plot([bend, bend, x - 0.2], [parent + 0.9, y, y], color=GRAY, lw=1)
        inner = bool(tree.has_children[node])
        ax.text(x, y, f"{node} {name}", va="center", weight="bold" if inner else "normal")


def _draw_rank(ax: Axes, tree: LabelTree, rank: int) -> None:
    """Draw a column with the rows of V that a rank stores and those that it gathers."""
    x, color = _COLUMNS + rank * _GAP, RANKS[rank]
    start, stop = shard_range(tree.num_nodes, rank, len(RANKS))
    ax.text(x, -0.5, f"rank {rank}", ha="center", weight="bold")
    ax.add_patch(Rectangle((x - 0.45, start + 0.05), 0.9, stop - start - 0.1, facecolor=color))
    for node in tree.ancestors(start).tolist():
        box = Rectangle((x - 0.4, node + 0.1), 0.8, 0.8, fill=False, edgecolor=color, lw=1.8)
        ax.add_patch(box)
        ax.text(x, node + 0.5, f"{node}", ha="center", va="center", fontsize=9)


def _draw_sum(ax: Axes, head: ClassHead, names: list[str], node: int) -> None:
    """Draw the row of the class at `node` as the sum of the rows on its path."""
    tree, class_id = head.tree, int(head.tree.class_of_node[node])
    path = [*tree.ancestors(node).tolist(), node]
    (rows,) = head.class_rows()
    row = rows.rows[rows.class_ids == class_id]
    torch.testing.assert_close(row[0], head.weight.detach()[path].sum(0))
    labels = [*(f"{n} {names[n]}" for n in path), f"row of class {names[node]}"]
    colors = [*(RANKS[_rank_of(n, tree)] for n in path), INK]
    _draw_strips(ax, torch.cat([head.weight.detach()[path], row]), labels, colors)


def _rank_of(node: int, tree: LabelTree) -> int:
    """The rank that stores the row of a node."""
    ranges = [shard_range(tree.num_nodes, rank, len(RANKS)) for rank in range(len(RANKS))]
    return [start <= node < stop for start, stop in ranges].index(True)


def _draw_strips(ax: Axes, vectors: Tensor, labels: list[str], colors: list[str]) -> None:
    """Draw vector + ... + vector = sum; the sum is the last of `vectors`."""
    y, size = float(_SUM), 0.78
    for i, (vector, label, color) in enumerate(zip(vectors, labels, colors, strict=True)):
        x = i * (_DIM * size + 1.1)
        cells(ax, vector[None], x, y, size=size, edge=color)
        sign = "" if i == 0 else ("=" if i == len(labels) - 1 else "+")
        ax.text(x - 0.55, y + size / 2, sign, ha="center", va="center", fontsize=14)
        ax.text(x + _DIM * size / 2, y + size + 0.3, label, ha="center", va="top")
