"""Statistics of a label tree, and whether it has useful structure."""

import numpy as np

from heads.tree.label_tree import LabelTree

_SMALLEST_JUDGED = 20
_TRIVIAL_SHARE = 0.5


def largest_family_share(tree: LabelTree) -> float:
    """Return the largest number of siblings, as a share of all nodes."""
    roots = np.count_nonzero(tree.parent < 0)
    return float(max(tree.num_children().max(), roots)) / tree.num_nodes


def is_near_trivial(tree: LabelTree) -> bool:
    """Return whether more than half of all nodes are siblings of each other, so that the tree has
    little structure."""
    return tree.num_classes >= _SMALLEST_JUDGED and largest_family_share(tree) > _TRIVIAL_SHARE


def statistics_of(tree: LabelTree) -> list[str]:
    """Return statistics of a tree as lines of text."""
    depths = tree.depth[tree.node_of_class]
    # The roots of a tree without inner nodes are its only family.
    families = tree.num_children()[tree.has_children] if tree.has_children.any() else tree.num_nodes
    return [
        f"{tree.num_classes:,} classes, {tree.num_nodes - tree.num_classes:,} pseudoclasses, "
        f"{tree.num_nodes:,} nodes",
        f"depth of classes: median {np.median(depths):.0f}, largest {depths.max()}",
        f"children per node: median {np.median(families):.0f}, largest {np.max(families):,} "
        f"({largest_family_share(tree):.0%} of all nodes in one family)",
    ]
