"""Class weights: which node vectors a rank holds, and how they add up to rows of classes.

One structure serves dense, U-tree and V-tree weights: w_class is the sum of the node vectors on the
path to the root (paper 000, eq 3). Nodes are numbered in depth-first pre-order and sharded
contiguously, as `Shard(0)` does; then the only vectors that a rank's classes need and it does not
hold are the ancestors of its first node.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.tree import LabelTree


def shard_range(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """The contiguous range of rows that `Shard(0)` gives to a rank; trailing ranks may be empty."""
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


@dataclass(frozen=True)
class NodeBlock:
    """A contiguous range of this rank's nodes, and the plan of their path sums.

    Vectors are laid out as [ancestors of the first node, root first] + [the nodes]. `levels` lists
    (child, parent) positions in that layout, parents before their children. `class_nodes` are the
    positions of the classes among the nodes, None where every node is a class.
    """

    start: int
    stop: int
    held_ancestors: Tensor
    boundary_ancestors: Tensor
    levels: tuple[tuple[Tensor, Tensor], ...]
    class_nodes: Tensor | None
    class_ids: Tensor
    first_position: int

    @property
    def is_plain(self) -> bool:
        """Every node is a class and a root: class rows are the held vectors as they lie."""
        return not self.levels and self.class_nodes is None

    @property
    def num_ancestors(self) -> int:
        return len(self.boundary_ancestors) + len(self.held_ancestors)


class ClassWeights:
    """The part of a label tree's node matrix V [N, d] that one rank holds: rows `start:stop`.

    Everything here is index arithmetic; the vectors themselves are passed in by the head.
    """

    def __init__(
        self, tree: LabelTree, *, group_rank: int = 0, group_size: int = 1, device: torch.device
    ) -> None:
        self.tree = tree
        self.device = device
        self.start, self.stop = shard_range(tree.num_nodes, group_rank, group_size)
        self.class_position = self._to_device(_inverse(tree.class_order))
        # Classes in node order; a block's classes stand at consecutive positions of this order.
        self._position_of_node = np.concatenate([[0], np.cumsum(tree.class_of_node >= 0)])
        self._boundary = _boundary_nodes(tree, group_size)
        self._blocks: dict[int, tuple[NodeBlock, ...]] = {}

    @property
    def num_held(self) -> int:
        return self.stop - self.start

    def blocks(self, nodes_at_once: int) -> tuple[NodeBlock, ...]:
        """This rank's nodes, cut into ranges of at most `nodes_at_once`; the last cut is kept.

        A range of pseudoclasses only has no logits and is left out.
        """
        if nodes_at_once not in self._blocks:
            edges = [*range(self.start, self.stop, nodes_at_once), self.stop]
            cut = [self._block(a, b) for a, b in itertools.pairwise(edges)]
            self._blocks = {nodes_at_once: tuple(block for block in cut if len(block.class_ids))}
        return self._blocks[nodes_at_once]

    def fetch_boundary(self, held: Tensor, group: ProcessGroup | None) -> Tensor:
        """The vectors [M, d] of every node that some rank needs and another holds (collective)."""
        rows = held.new_zeros((len(self._boundary), held.shape[1]))
        mine, local = self._held_boundary()
        rows[mine] = held[local]
        return all_reduce_sum(rows, group) if len(rows) else rows

    def return_boundary(self, grad: Tensor, grad_held: Tensor, group: ProcessGroup | None) -> None:
        """Add what other ranks' classes gave to this rank's boundary vectors (collective)."""
        if len(grad):
            all_reduce_sum(grad, group)
            mine, local = self._held_boundary()
            grad_held.index_add_(0, local, grad[mine])

    def held_rows(self, block: NodeBlock, held: Tensor) -> Tensor:
        """The part of a tensor laid out as the held vectors that belongs to a block's nodes."""
        return held[block.start - self.start : block.stop - self.start]

    def rows(self, block: NodeBlock, held: Tensor, boundary: Tensor) -> Tensor:
        """Class rows [C, d] of a block: node vectors summed down their paths, level by level."""
        own = self.held_rows(block, held)
        if block.is_plain:
            return own
        ancestors = boundary[block.boundary_ancestors], held[block.held_ancestors]
        sums = torch.cat([*ancestors, own])
        for child, parent in block.levels:
            sums[child] += sums[parent]
        sums = sums[block.num_ancestors :]
        return sums if block.class_nodes is None else sums[block.class_nodes]

    def add_gradient(
        self, block: NodeBlock, grad_rows: Tensor, grad_held: Tensor, grad_boundary: Tensor
    ) -> None:
        """Add the gradient of a block's class rows [C, d] to that of the node vectors."""
        own = self.held_rows(block, grad_held)
        if block.is_plain:
            own += grad_rows
            return
        num_nodes = block.stop - block.start
        grad = grad_rows.new_zeros((block.num_ancestors + num_nodes, grad_rows.shape[1]))
        nodes = grad[block.num_ancestors :]
        nodes[slice(None) if block.class_nodes is None else block.class_nodes] = grad_rows
        for child, parent in reversed(block.levels):
            grad.index_add_(0, parent, grad[child])
        own += nodes
        boundary, held = grad[: block.num_ancestors].split(
            [len(block.boundary_ancestors), len(block.held_ancestors)]
        )
        grad_boundary[block.boundary_ancestors] += boundary
        grad_held[block.held_ancestors] += held

    def _block(self, start: int, stop: int) -> NodeBlock:
        tree = self.tree
        ancestors, levels = path_levels(tree, start, stop)
        remote = ancestors[ancestors < self.start]
        class_nodes = np.flatnonzero(tree.class_of_node[start:stop] >= 0)
        first = int(self._position_of_node[start])
        return NodeBlock(
            start=start,
            stop=stop,
            held_ancestors=self._to_device(ancestors[ancestors >= self.start] - self.start),
            boundary_ancestors=self._to_device(np.searchsorted(self._boundary, remote)),
            levels=tuple((self._to_device(a), self._to_device(b)) for a, b in levels),
            class_nodes=None if len(class_nodes) == stop - start else self._to_device(class_nodes),
            class_ids=self._to_device(tree.class_order[first : first + len(class_nodes)]),
            first_position=first,
        )

    def _held_boundary(self) -> tuple[Tensor, Tensor]:
        """Which boundary rows this rank holds, and where."""
        mine = np.flatnonzero((self._boundary >= self.start) & (self._boundary < self.stop))
        return self._to_device(mine), self._to_device(self._boundary[mine] - self.start)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.int64)).to(self.device)


def path_levels(
    tree: LabelTree, start: int, stop: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """How values of the nodes `start:stop` add up down their paths.

    Gives the ancestors of the first node, root first, and by depth the (child, parent) positions in
    the layout [ancestors] + [nodes], parents before their children.
    """
    ancestors = tree.ancestors(start)
    layout = np.concatenate([ancestors, np.arange(start, stop)])
    depth, parent = tree.depth[layout], tree.parent[layout]
    # In pre-order a parent before `start` is an ancestor of the first node.
    position = np.where(
        parent >= start,
        parent - start + len(ancestors),
        np.searchsorted(ancestors, parent),
    )
    order = np.argsort(depth, kind="stable")
    by_depth = np.split(order, np.flatnonzero(np.diff(depth[order])) + 1)
    children = [level[parent[level] >= 0] for level in by_depth]
    return ancestors, [(child, position[child]) for child in children if len(child)]


def _boundary_nodes(tree: LabelTree, group_size: int) -> np.ndarray:
    """Sorted ids of the ancestors that any rank's first node has on ranks before it."""
    starts = [shard_range(tree.num_nodes, rank, group_size) for rank in range(1, group_size)]
    paths: Sequence[np.ndarray] = [tree.ancestors(a) for a, b in starts if b > a]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *paths]))


def _inverse(permutation: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
