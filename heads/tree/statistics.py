"""Statistics of a label tree, and whether it has useful structure."""

from dataclasses import dataclass

import numpy as np

from heads.tree.label_tree import IntArray, LabelTree

_SMALLEST_JUDGED = 20
_TRIVIAL_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class TreeStatistics:
    """Counts of a tree.

    `leaf_depths[i]` is the number of classes at depth i. `families` [F] lists the number of
    children of each inner node, followed by the number of roots.
    """

    num_nodes: int
    num_classes: int
    leaf_depths: IntArray
    families: IntArray

    @classmethod
    def of(cls, tree: LabelTree) -> "TreeStatistics":
        families = np.append(tree.num_children, np.count_nonzero(tree.parent < 0))
        return cls(
            tree.num_nodes,
            tree.num_classes,
            np.bincount(tree.depth[tree.node_of_class]),
            families[families > 0],
        )

    @property
    def num_pseudoclasses(self) -> int:
        return self.num_nodes - self.num_classes

    @property
    def largest_family_share(self) -> float:
        """The number of nodes in the largest family, as a share of all nodes."""
        return float(self.families.max()) / self.num_nodes

    @property
    def near_trivial(self) -> bool:
        """Whether more than half of all nodes are siblings of each other, so that the tree has
        little structure."""
        judged = self.num_classes >= _SMALLEST_JUDGED
        return judged and self.largest_family_share > _TRIVIAL_SHARE

    def lines(self) -> list[str]:
        """Return the statistics as lines of text."""
        inner = self.families[:-1] if self.families.size > 1 else self.families
        depths = np.repeat(np.arange(len(self.leaf_depths)), self.leaf_depths)
        return [
            f"{self.num_classes:,} classes, {self.num_pseudoclasses:,} pseudoclasses, "
            f"{self.num_nodes:,} nodes",
            f"depth of classes: median {np.median(depths):.0f}, largest {depths.max()}",
            *_histogram(self.leaf_depths),
            f"children per node: median {np.median(inner):.0f}, largest {self.families.max():,} "
            f"({self.largest_family_share:.0%} of all nodes)",
        ]


def _histogram(counts: IntArray, *, width: int = 40) -> list[str]:
    most = int(counts.max())
    return [
        f"  {depth:3d} {count:10,} {'#' * max(1, round(width * count / most))}"
        for depth, count in enumerate(counts.tolist())
        if count
    ]
