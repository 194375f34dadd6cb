"""Hierarchical softmax over a label tree (Morin and Bengio 2005): a softmax at every inner node.

p(class) is the product, along the class's path, of the softmax of each node among its siblings (of
a root among the roots). The head is an ordinary sharded head whose columns are the nodes of the
tree, so it uses the same engine. The score of a class is its log-probability; classes do not have
weight rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from heads.collectives import all_gather_rows, group_size
from heads.engine.inputs import class_ids, is_integral
from heads.head import ClassHead, ClassScores
from heads.logits import ClassRows
from heads.losses import ClassFacts, HierarchicalSoftmax, Loss
from heads.tree import LabelTree
from heads.weights import shard_range

# The node ID of an ignored label. It is negative because `ignore_index` may be a valid class ID,
# which may also be a valid node ID.
_IGNORED_NODE = -100

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
        ignore_index: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.label_tree = classes_at_leaves(tree)
        self.ignore_index = ignore_index
        super().__init__(
            dim,
            self.label_tree.num_nodes,
            HierarchicalSoftmax(),
            bias=bias,
            mesh=mesh,
            seed=seed,
            init_std=init_std,
            memory_mib=memory_mib,
            ignore_index=None if ignore_index is None else _IGNORED_NODE,
            device=device,
            dtype=dtype,
        )
        leaves = torch.from_numpy(self.label_tree.node_of_class.astype(np.int64))
        self.register_buffer("leaf_of_class", leaves.to(device), persistent=False)

    leaf_of_class: Tensor

    @property
    def num_classes(self) -> int:
        return self.label_tree.num_classes

    def _prepared(self, loss: Loss, facts: ClassFacts) -> Loss:
        return loss.prepare(replace(facts, tree=self.label_tree))

    @torch.compiler.disable
    def forward(
        self,
        features: Tensor,
        labels: Tensor,
        row_weights: Tensor | None = None,
        *,
        rows_of_ranks: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the mean of -log p(label) over the global batch; see `ClassHead.forward`
        (collective)."""
        leaves = self._leaves(labels)
        return super().forward(features, leaves, row_weights, rows_of_ranks=rows_of_ranks)

    def check(self, features: Tensor, labels: Tensor, row_weights: Tensor | None = None) -> None:
        super().check(features, self._leaves(labels), row_weights)

    def row_weights(self, labels: Tensor, factors: Tensor | None = None) -> Tensor:
        return super().row_weights(self._leaves(labels), factors)

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
        tree = self.label_tree
        start, stop = self.engine.weights.start, self.engine.weights.stop
        for first in range(start, stop, classes_at_once):
            block = _ScoreBlock.cut(tree, first, min(first + classes_at_once, stop))
            if len(block.class_ids):
                ids = self._tensor(block.nodes)
                rows = ClassRows(ids, nodes[ids], None if bias is None else bias[ids])
                logits = self.logits(features, rows)
                yield ClassScores(self._tensor(block.class_ids), block.log_probabilities(logits))

    def _of_all_nodes(self, held: Tensor) -> Tensor:
        group = self.engine.class_group
        size = group_size(group)
        ranges = [shard_range(self.label_tree.num_nodes, rank, size) for rank in range(size)]
        return all_gather_rows(held.detach(), [b - a for a, b in ranges], group)

    def _leaves(self, labels: Tensor) -> Tensor:
        """Map labels to leaves; an out-of-range label becomes a node that the engine rejects."""
        if not is_integral(labels) or labels.device != self.leaf_of_class.device:
            return labels  # the engine also rejects these, on all ranks
        labels = class_ids(labels)
        known = (labels >= 0) & (labels < self.num_classes)
        leaves = self.leaf_of_class[torch.where(known, labels, 0)]
        leaves = torch.where(known, leaves, self.label_tree.num_nodes)
        if self.ignore_index is None:
            return leaves
        return torch.where(labels == self.ignore_index, _IGNORED_NODE, leaves)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.weight.device)


@dataclass(frozen=True)
class _ScoreBlock:
    """The nodes `start:stop`, the other nodes that their softmaxes need, and their path sums.

    `nodes` [S] are all of these nodes, and `group` [S] is the index of each node's softmax.
    `layout` contains the positions in `nodes` of [ancestors of `start`] + [start:stop].
    """

    nodes: np.ndarray
    group: np.ndarray
    layout: np.ndarray
    levels: list[tuple[np.ndarray, np.ndarray]]
    leaves: np.ndarray
    class_ids: np.ndarray

    @classmethod
    def cut(cls, tree: LabelTree, start: int, stop: int) -> "_ScoreBlock":
        ancestors, levels = _path_levels(tree, start, stop)
        # In pre-order, only ancestors of `start` and `stop` have children both inside and outside
        # the range. A softmax needs all siblings of a node, so add the roots and the children of
        # these ancestors.
        inner = [ancestors, tree.ancestors(stop) if stop < tree.num_nodes else ancestors[:0], [-1]]
        siblings = np.flatnonzero(np.isin(tree.parent, np.concatenate(inner)))
        nodes = np.union1d(np.arange(start, stop), siblings)
        _, group = np.unique(tree.parent[nodes], return_inverse=True)
        layout = np.searchsorted(nodes, np.concatenate([ancestors, np.arange(start, stop)]))
        classes = tree.class_of_node[start:stop]
        leaves = len(ancestors) + np.flatnonzero(classes >= 0)
        return cls(nodes, group, layout, levels, leaves, classes[classes >= 0])

    def log_probabilities(self, logits_bS: Tensor) -> Tensor:
        """Return the log-probabilities [b, C] of the block's classes from logits of `nodes`."""
        device = logits_bS.device
        group = torch.from_numpy(self.group).to(device)
        shape = (len(logits_bS), int(self.group.max()) + 1)
        top = logits_bS.new_full(shape, -torch.inf)
        top = top.scatter_reduce(1, group.expand(len(logits_bS), -1), logits_bS, "amax")
        total = logits_bS.new_zeros(shape).index_add_(1, group, (logits_bS - top[:, group]).exp())
        factors = logits_bS - (top + total.log())[:, group]
        sums = factors[:, torch.from_numpy(self.layout).to(device)]
        for child, parent in self.levels:
            sums[:, torch.from_numpy(child)] += sums[:, torch.from_numpy(parent)]
        return sums[:, torch.from_numpy(self.leaves).to(device)]


def _path_levels(
    tree: LabelTree, start: int, stop: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Plan the sums of values over the paths of the nodes `start:stop`.

    Returns the ancestors of the first node, root first, and for each depth the (child, parent)
    positions in the layout [ancestors] + [nodes]. Adding parents to children in this order, from
    the top level down, gives the path sums.
    """
    ancestors = tree.ancestors(start)
    layout = np.concatenate([ancestors, np.arange(start, stop)])
    depth, parent = tree.depth[layout], tree.parent[layout]
    # In pre-order, a parent before `start` is an ancestor of the first node.
    position = np.where(
        parent >= start,
        parent - start + len(ancestors),
        np.searchsorted(ancestors, parent),
    )
    order = np.argsort(depth, kind="stable")
    by_depth = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
    children = [level[parent[level] >= 0] for level in by_depth]
    return ancestors, [(child, position[child]) for child in children if len(child)]


def classes_at_leaves(tree: LabelTree) -> LabelTree:
    """Return the tree with each class of an inner node moved to a new leaf below that node."""
    inner = np.flatnonzero(tree.has_children & (tree.class_of_node >= 0))
    moved = np.where(tree.has_children, -1, tree.class_of_node)
    return LabelTree.from_parents(
        np.concatenate([tree.parent, inner]),
        np.concatenate([moved, tree.class_of_node[inner]]),
    )
