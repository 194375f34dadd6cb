"""Hierarchical softmax over a label tree (Morin and Bengio 2005): a softmax at every inner node.

p(class) is the product, along the class's path, of the softmax of each node among its siblings (of
a root among the roots). The head is an ordinary sharded head whose columns are the nodes of the
tree, so it uses the same engine. The score of a class is its log-probability; classes do not have
weight rows.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import all_gather_rows, group_size
from heads.engine.inputs import is_integral
from heads.head import ClassHead, ClassScores
from heads.label_sets import LabelSets
from heads.logit_maps import ClassRows
from heads.losses import ClassFacts, HierarchicalSoftmax, Loss
from heads.tree import LabelTree
from heads.weights import shard_range

# Shape legend: b rows, S nodes of a block of scores, C classes of that block.


class HierarchicalSoftmaxHead(ClassHead):
    """The head of hierarchical softmax: a `ClassHead` over the nodes of `tree`.

    A class at an inner node is moved to a new leaf below that node, so that it can be predicted.
    """

    supports_row_update = False

    def __init__(
        self,
        dim: int,
        tree: LabelTree,
        *,
        bias: bool = True,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        init_std: float = 0.01,
        memory_mib: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.label_tree = classes_at_leaves(tree)
        super().__init__(
            dim,
            self.label_tree.num_nodes,
            HierarchicalSoftmax(),
            bias=bias,
            mesh=mesh,
            seed=seed,
            init_std=init_std,
            memory_mib=memory_mib,
            device=device,
            dtype=dtype,
        )
        leaves = torch.from_numpy(self.label_tree.node_of_class.astype(np.int64))
        self.register_buffer("leaf_of_class", leaves.to(device), persistent=False)

    leaf_of_class: Tensor

    @property
    def class_tree(self) -> LabelTree:
        return self.label_tree

    def _prepared(self, loss: Loss, facts: ClassFacts) -> Loss:
        return loss.prepare(replace(facts, tree=self.label_tree))

    def tree_digest(self) -> str:
        return self.label_tree.digest()

    def class_rows(self, classes_at_once: int = 4096) -> Iterator[ClassRows]:
        """Raise ValueError, because classes do not have weight rows."""
        raise ValueError(
            "hierarchical_softmax does not have one weight row per class, so it cannot be exported "
            "for single-class queries: train with another head.loss"
        )

    def score_blocks(self, features: Tensor, classes_at_once: int = 4096) -> Iterator[ClassScores]:
        """Yield log-probabilities [b, C] of this rank's classes, in blocks.

        Computing the first block is a collective: every rank gathers all node vectors once, because
        a block needs the siblings of the nodes on its paths, and other ranks may hold them.
        """
        nodes, bias = self._of_all_nodes(self.weight), None
        if self.bias is not None:
            bias = self._of_all_nodes(self.bias)
        tree, stop = self.label_tree, self.engine.weights.stop
        for first in range(self.engine.weights.start, stop, classes_at_once):
            last = min(first + classes_at_once, stop)
            own = first + np.flatnonzero(tree.class_of_node[first:last] >= 0)
            if not len(own):
                continue
            # A softmax needs all siblings of a node. In pre-order, only ancestors of `first` and
            # `last` have children both inside and outside the range, so add the roots and the
            # children of these ancestors. They include the ancestors themselves.
            above = [tree.ancestors(each) for each in (first, last) if each < tree.num_nodes]
            siblings = np.flatnonzero(np.isin(tree.parent, np.concatenate([*above, [-1]])))
            included = np.union1d(np.arange(first, last), siblings)
            ids = self._tensor(included)
            rows = ClassRows(ids, nodes[ids], None if bias is None else bias[ids])
            log_p = _log_probabilities(tree, included, self.logits(features, rows))
            columns = self._tensor(np.searchsorted(included, own))
            yield ClassScores(self._tensor(tree.class_of_node[own]), log_p[:, columns])

    def _of_all_nodes(self, held: Tensor) -> Tensor:
        group = self.engine.class_group
        size = group_size(group)
        ranges = [shard_range(self.label_tree.num_nodes, rank, size) for rank in range(size)]
        return all_gather_rows(held.detach(), [b - a for a, b in ranges], group)

    def _node_labels(self, labels: Tensor | LabelSets) -> Tensor | LabelSets:
        """Map labels to leaves; an out-of-range label becomes a node that the engine rejects."""
        if (
            isinstance(labels, LabelSets)
            or not is_integral(labels)
            or labels.device != self.leaf_of_class.device
        ):
            return labels  # the engine also rejects these, on all ranks
        labels = labels.long()
        known = (labels >= 0) & (labels < self.num_classes)
        leaves = self.leaf_of_class[torch.where(known, labels, 0)]
        return torch.where(known, leaves, self.label_tree.num_nodes)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, np.int64)).to(self.weight.device)


def _log_probabilities(tree: LabelTree, nodes: np.ndarray, logits_bS: Tensor) -> Tensor:
    """Return the log-probabilities [b, S] of `nodes` [S], given their logits. The nodes are
    ascending and include the siblings and the ancestors of each of them."""
    parent, depth = tree.parent[nodes], tree.depth[nodes]
    position = torch.from_numpy(np.searchsorted(nodes, parent))
    group = torch.from_numpy(np.unique(parent, return_inverse=True)[1]).to(logits_bS.device)
    shape = (len(logits_bS), int(group.max()) + 1)
    top = logits_bS.new_full(shape, -torch.inf)
    top = top.scatter_reduce(1, group.expand(len(logits_bS), -1), logits_bS, "amax")
    total = logits_bS.new_zeros(shape).index_add_(1, group, (logits_bS - top[:, group]).exp())
    sums = logits_bS - (top + total.log())[:, group]
    for level in range(1, int(depth.max()) + 1):  # sum along the paths, from the top down
        children = torch.from_numpy(np.flatnonzero(depth == level))
        sums[:, children] += sums[:, position[children]]
    return sums


def classes_at_leaves(tree: LabelTree) -> LabelTree:
    """Return the tree with each class of an inner node moved to a new leaf below that node."""
    inner = np.flatnonzero(tree.has_children & (tree.class_of_node >= 0))
    moved = np.where(tree.has_children, -1, tree.class_of_node)
    return LabelTree.from_parents(
        np.concatenate([tree.parent, inner]),
        np.concatenate([moved, tree.class_of_node[inner]]),
    )
