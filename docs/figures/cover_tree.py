"""A cover tree of points in the plane: its nets level by level, and its V-tree."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from docs.figures.look import BLUE, INK, PALE, bare, new_figure
from heads import CoverTree, LabelTree, build_cover_tree

_BASE = 2.0
_LEVELS = 4
_NAMES = "abcdefghijkl"
_POINTS = np.array(  # three clusters of four
    [
        *[(0, 0), (1.1, 0.5), (0.1, 1.3), (2.2, -0.4)],
        *[(5.3, 0.7), (6.4, 0.0), (6.1, 1.6), (7.4, 1.0)],
        *[(2.5, 4.6), (3.6, 4.0), (3.3, 5.5), (4.9, 4.9)],
    ]
)


def draw() -> Figure:
    cover = build_cover_tree(_POINTS, base=_BASE, metric="euclidean")
    figure = new_figure(5.6)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.4))[:, 0]
    for level, ax in enumerate(above.subplots(1, _LEVELS)):
        _draw_net(ax, cover, level)
    _draw_vtree(below.subplots(), cover)
    return figure


def _draw_net(ax: Axes, cover: CoverTree, level: int) -> None:
    """Draw the net of a level: every point is in a ball around a member."""
    radius = cover.base ** -(level + 1) / cover.scale
    members = cover.level <= level
    for member in _POINTS[members]:
        ax.add_patch(Circle(member, radius, facecolor=BLUE, alpha=0.10, edgecolor="none"))
        ax.add_patch(Circle(member, radius, fill=False, edgecolor=BLUE, lw=0.8))
    for (x, y), name, is_member in zip(_POINTS, _NAMES, members, strict=True):
        inside = {"boxstyle": "circle,pad=0.15", "facecolor": INK, "edgecolor": "none"}
        outside = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.8}
        ax.text(
            x,
            y,
            name,
            ha="center",
            va="center",
            fontsize=9.5,
            color="white" if is_member else INK,
            bbox=inside if is_member else outside,
        )
    ax.set(xlim=(-1.3, 8.7), ylim=(-2.0, 7.0))
    bare(ax)
    num_members = int(members.sum())
    ax.set_title(f"level {level}: {num_members} member{'' if num_members == 1 else 's'}")


def _draw_vtree(ax: Axes, cover: CoverTree) -> None:
    tree, centers = cover.vtree(), cover.pseudoclass_centers()
    x = _x_of_nodes(tree)
    names = _node_names(tree, centers)
    for node, name in enumerate(names):
        y, parent = -tree.depth[node], tree.parent[node]
        if parent >= 0:
            ax.plot([x[parent], x[node]], [-tree.depth[parent], y], color=PALE, lw=1.3, zorder=1)
        inner = bool(tree.has_children[node])
        box = {"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": BLUE, "lw": 1.4}
        ax.text(
            x[node],
            y,
            name,
            ha="center",
            va="center",
            color=BLUE if inner else INK,
            bbox=box if inner else {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    ax.set(xlim=(-0.7, max(x) + 0.7), ylim=(-tree.depth.max() - 0.5, 0.5))
    ax.axis("off")
    ax.set_title("V-tree: inner nodes are pseudoclasses, named after their centers", y=0.97)


def _x_of_nodes(tree: LabelTree) -> np.ndarray:
    """The x coordinates [N] of nodes: leaves in pre-order, inner nodes centered on their
    children."""
    x = np.zeros(tree.num_nodes)
    x[~tree.has_children] = np.arange(tree.num_nodes - tree.has_children.sum())
    for node in np.flatnonzero(tree.has_children)[::-1]:
        x[node] = x[tree.parent == node].mean()
    return x


def _node_names(tree: LabelTree, centers: np.ndarray) -> list[str]:
    pseudoclasses = iter(centers.tolist())
    return [_NAMES[c if c >= 0 else next(pseudoclasses)] for c in tree.class_of_node.tolist()]
