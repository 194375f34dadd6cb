"""The gradients of a tree's inner nodes, accumulated while the leaves are updated.

`ClassWeights.sum_gradients` needs the gradients of all nodes at once. Here, only the inner nodes
have a row: the gradient of a leaf is added to that of its parent and then no longer needed.
"""

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.weights import ClassWeights

# Shape legend: C classes of a block, d features, I inner nodes of this rank, m ancestors of its
# first node, all of them on other ranks.


class InnerNodes:
    """Where the gradients of a rank's nodes are added: the plan of `InnerGradients`.

    The sums have I + m + 1 rows: one for each inner node of this rank, one for each ancestor of its
    first node, and one for the gradients of roots, which nothing needs.
    """

    def __init__(self, weights: ClassWeights) -> None:
        tree, start, stop = weights.tree, weights.start, weights.stop
        self.weights = weights
        has_children = tree.has_children[start:stop]
        inner = np.flatnonzero(has_children)
        chain = tree.ancestors(start) if stop > start else np.empty(0, np.int64)
        self.num_inner, self.num_rows = len(inner), len(inner) + len(chain) + 1
        row = np.cumsum(has_children) - 1  # of each inner node
        parent = tree.parent[start:stop]
        above = np.where(
            parent >= start,
            row[np.maximum(parent - start, 0)] if len(row) else parent,
            np.where(parent < 0, self.num_rows - 1, len(inner) + np.searchsorted(chain, parent)),
        )
        nodes, device = weights.node_of_position.cpu().numpy(), weights.device
        self.is_leaf = torch.from_numpy(~has_children[nodes]).to(device).unsqueeze(1)
        self.row_of_class = torch.from_numpy(
            np.where(has_children[nodes], row[nodes], above[nodes])
        ).to(device)
        self.row_of_node = torch.from_numpy(row).to(device)
        # The inner nodes of each level, from the deepest one, and the rows of their parents.
        depth = tree.depth[start:stop][inner]
        self.levels = [
            tuple(torch.from_numpy(each).to(device) for each in (level, above[inner[level]]))
            for level in (np.flatnonzero(depth == number) for number in np.unique(depth)[::-1])
        ]


class InnerGradients:
    """The gradients [I, d] of a rank's inner nodes, in the dtype of the gradients of class rows."""

    def __init__(self, plan: InnerNodes, dim: int, dtype: torch.dtype) -> None:
        self._plan = plan
        device = plan.weights.device
        self._sums = torch.zeros(plan.num_rows, dim, dtype=dtype, device=device)

    def add(self, positions: slice | Tensor, grad_Cd: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of the class rows at `positions`. Return the nodes [C] of these
        classes, and whether they are leaves [C, 1]."""
        plan = self._plan
        self._sums.index_add_(0, plan.row_of_class[positions], grad_Cd)
        return plan.weights.node_of_position[positions], plan.is_leaf[positions]

    def total(self, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Return the inner nodes [I] and their gradients [I, d] (collective).

        Call this once, after the gradients of all classes have been added.
        """
        plan, sums = self._plan, self._sums
        for rows, above in plan.levels:
            sums.index_add_(0, above, sums[rows])
        weights, inner = plan.weights, sums[: plan.num_inner]
        if weights.has_boundary:
            nodes, grads = weights.boundary_gradients(sums[plan.num_inner : -1], group)
            inner.index_add_(0, plan.row_of_node[nodes], grads)
        if weights.damping:
            inner *= weights.inner_scale.to(sums.dtype)
        return weights.inner_nodes, inner
