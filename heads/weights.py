"""Sharded class weights: the node vectors that a rank holds, and their sums, the class rows.

Dense, U-tree and V-tree weights share one structure: w_class is the sum of the node vectors on the
path from the root to the class (Eq. 3 of paper 000). Nodes are numbered in depth-first pre-order
and sharded contiguously, as `Shard(0)` does. The only vectors that a rank's classes need from other
ranks are therefore those of the ancestors of its first node, the boundary of the rank.

In this example, two ranks hold eight nodes. The first node of rank 1 is 4, whose ancestors are 0
and 1:

    node      0  1  2  3   4  5  6  7
    parent    -  0  1  1   1  0  5  5
    rank      0  0  0  0   1  1  1  1

A path of rank 1 begins with the first few of these ancestors and continues with nodes that rank 1
holds: 0 1 | 4, 0 | 5 6 or 0 | 5 7. A row is therefore the sum over the held part of its path plus
one of the prefix sums 0, v0 and v0 + v1. Forward all-reduces the vectors of the boundary nodes of
all ranks, at most `depth` per rank; each rank then computes the prefix sums of its own boundary.

Backward sums the gradients of class rows over subtrees, from the deepest level up. The parents of
nodes 4 and 5 are on another rank. The sums of these nodes are accumulated along the boundary from
the bottom up: node 1 gets the sum of node 4, and node 0 gets the sums of nodes 4 and 5. One
all-reduce sends both results to the rank that holds nodes 0 and 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding_bag

from heads.collectives import all_reduce_sum
from heads.losses.base import Choice, HeldClasses
from heads.rows.node_values import NodeValues, wide_dtype
from heads.tree import LabelTree

# Number of parents whose children are summed at a time; bounds the memory needed besides the
# gradient.
_PARENTS_AT_ONCE = 8192
# The path of every class is stored. This limit is far above the depth of any realistic label tree,
# and 1,000 nodes per class still fit in memory.
_DEEPEST = 1000

# Shape legend: N nodes, n nodes of this rank, C classes of a block, d features, M boundary nodes.


def shard_range(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the contiguous range of rows that `Shard(0)` assigns to a rank.

    The ranges of trailing ranks may be empty.
    """
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


@dataclass(frozen=True)
class ClassBlock:
    """Some of a rank's classes: their ascending positions among its classes, and their IDs [C].

    `paths` concatenates their paths, restricted to nodes that this rank holds, `offsets` [C] is the
    start of each path, and `num_remote` [C] counts the nodes of each path that other ranks hold.
    All three are None if every class is a root. `weights` [C] are the weights of a `Choice`.
    """

    positions: slice | Tensor
    class_ids: Tensor
    paths: Tensor | None = None
    offsets: Tensor | None = None
    num_remote: Tensor | None = None
    weights: Tensor | None = None


class ClassWeights:
    """The rows `start:stop` of a label tree's node matrix V [N, d] that one rank holds.

    This class stores only indices. The head passes the values: node vectors [n, d], or the bias as
    [n, 1]. The gradient of an inner node is a sum over the classes below it. With `damping` p, it
    is divided by the number of these classes to the power p. Raises ValueError for a tree of more
    than 1,000 levels.
    """

    def __init__(
        self,
        tree: LabelTree,
        *,
        group_rank: int = 0,
        group_size: int = 1,
        device: torch.device,
        damping: float = 0.0,
    ) -> None:
        if tree.depth.max() > _DEEPEST:
            raise ValueError(
                f"the label tree has a depth of {tree.depth.max()}: use a tree with a depth of at "
                f"most {_DEEPEST}"
            )
        self.tree, self.device, self.damping = tree, device, damping
        self.group_rank, self.group_size = group_rank, group_size
        self.tree_digest = int(tree.digest()[:8], 16)
        self.start, self.stop = shard_range(tree.num_nodes, group_rank, group_size)
        first = int(np.count_nonzero(tree.class_of_node[: self.start] >= 0))
        last = first + int(np.count_nonzero(tree.class_of_node[self.start : self.stop] >= 0))
        position = None
        if not tree.is_dense:  # the inverse of the class order
            position = torch.empty(tree.num_classes, dtype=torch.int32)
            order = torch.from_numpy(tree.class_order.astype(np.int64))
            position[order] = torch.arange(tree.num_classes, dtype=torch.int32)
            position = position.to(device)
        self.held = HeldClasses(self._to_device(tree.class_order[first:last]), position, first)
        # Whether every node is a class and a root, so that class rows are the held vectors.
        self.is_plain = tree.is_flat
        if not self.is_plain:
            self._plan_paths(tree.node_of_class[tree.class_order[first:last]])
            self._plan_gradients(group_size)

    def rebuilt(self, tree: LabelTree, device: torch.device) -> "ClassWeights":
        """Return this rank's part of a different tree, or the same plan for another device."""
        return ClassWeights(
            tree,
            group_rank=self.group_rank,
            group_size=self.group_size,
            device=device,
            damping=self.damping,
        )

    @property
    def num_held(self) -> int:
        return self.stop - self.start

    @property
    def has_boundary(self) -> bool:
        """Whether a rank needs nodes of other ranks; the same on every rank."""
        return not self.is_plain and len(self._boundary) > 0

    def blocks(self, classes_at_once: int, choice: Choice | None = None) -> Iterator[ClassBlock]:
        """Yield this rank's classes, or those of `choice`, in blocks of `classes_at_once`."""
        num = len(self.held.class_ids) if choice is None else len(choice.positions)
        for start in range(0, num, classes_at_once):
            part = slice(start, min(start + classes_at_once, num))
            if choice is None:
                yield self._block(part)
            else:
                weights = None if choice.weights is None else choice.weights[part]
                yield replace(self._block(choice.positions[part]), weights=weights)

    def columns(self, block: ClassBlock, labels: Tensor) -> Tensor:
        """Return the columns [b] of labels in a block; outside 0..C-1 for any other label."""
        positions = self.held.positions(labels)
        if isinstance(block.positions, slice):
            return positions.sub_(block.positions.start)
        columns = torch.searchsorted(block.positions, positions).clamp_(
            max=len(block.positions) - 1
        )
        return torch.where(block.positions[columns] == positions, columns, -1)

    def with_boundary(self, values: NodeValues, group: ProcessGroup | None) -> NodeValues:
        """Add the boundary sums of this rank to the held values (collective)."""
        if not self.has_boundary:
            return values
        held = values.held
        wide = wide_dtype(held.dtype)
        rows = held.new_zeros((len(self._boundary), held.shape[1]), dtype=wide)
        rows[self._boundary_mine] = values.read(self._boundary_local).to(wide)
        # Each boundary row is set on the rank that holds it and zero on the others, so the sum
        # sends all boundary rows to all ranks. `_chain` selects the ancestors of this rank.
        chain = all_reduce_sum(rows, group)[self._chain]
        if not len(chain):
            return values
        return replace(values, boundary=torch.cat([torch.zeros_like(rows[:1]), chain.cumsum(0)]))

    def rows(self, block: ClassBlock, values: NodeValues) -> Tensor:
        """Return the class rows [C, d] of a block: the sum of the values along each path.

        For blocks that fit in the cache, this costs no more than a copy, regardless of the batch
        size. The alternative, summing logits down the tree, would need the product of every inner
        node with the features.
        """
        if block.paths is None:
            return values.read(block.positions)
        assert block.offsets is not None
        rows = values.path_sums(block.paths, block.offsets)
        # The remote nodes of a path are always the first ones of the rank's boundary.
        boundary = values.boundary
        return rows if boundary is None else rows + boundary[block.num_remote]

    def rows_of_labels(self, labels: Tensor, values: NodeValues) -> Tensor:
        """Return the class rows [b, d] of labels; those of other ranks' classes are arbitrary.

        This rank must hold at least one class.
        """
        _, positions = self.held.nearest(labels)
        if self.is_plain:
            return values.read(positions)
        # The paths are padded to the same length with a node of weight 0, because only the device
        # knows their lengths.
        steps = torch.arange(self._longest_path, device=self.device)
        exists = steps < self._path_lengths[positions].unsqueeze(1)
        index = (self._path_starts[positions].unsqueeze(1) + steps).where(exists, 0)
        paths = self._paths[index].flatten()
        starts = torch.arange(0, len(paths), max(len(steps), 1), device=self.device)
        weights = exists.flatten().to(wide_dtype(values.held.dtype))
        rows = values.path_sums(paths, starts.to(paths.dtype), weights)
        boundary = values.boundary
        return rows if boundary is None else rows + boundary[self._num_remote[positions]]

    def gradient_like(self, held: Tensor, dtype: torch.dtype, *, every_class: bool) -> Tensor:
        """Create a gradient buffer [n, d] for `put_gradient`, zero in rows that it never writes."""
        if not every_class:
            return torch.zeros_like(held, dtype=dtype)
        grad = torch.empty_like(held, dtype=dtype)
        if not self.is_plain:
            grad.index_fill_(0, self._pseudoclasses, 0)
        return grad

    def contiguous_part(self, block: ClassBlock, grad_held: Tensor) -> Tensor | None:
        """Return the slice of `grad_held` for a block's class rows; None if not contiguous."""
        is_contiguous = self.is_plain and isinstance(block.positions, slice)
        return grad_held[block.positions] if is_contiguous else None

    def put_gradient(self, block: ClassBlock, grad_rows: Tensor, grad_held: Tensor) -> None:
        """Write the gradient [C, d] of a block's class rows to the nodes of its classes."""
        positions = block.positions if self.is_plain else self.node_of_position[block.positions]
        grad_held[positions] = grad_rows.to(grad_held.dtype)

    def add_gradient_of_labels(self, labels: Tensor, grads: Tensor, grad_held: Tensor) -> None:
        """Add gradients [b, d] of class rows to the nodes of `labels` [b]. The gradients of classes
        of other ranks must be 0. This rank must hold at least one class."""
        _, positions = self.held.nearest(labels)
        nodes = positions if self.is_plain else self.node_of_position[positions]
        grad_held.index_add_(0, nodes, grads.to(grad_held.dtype))

    def sum_gradients(self, grad_held: Tensor, group: ProcessGroup | None) -> None:
        """Convert gradients of class rows to those of node vectors, in place (collective).

        A node vector is a term of every class row in its subtree, so its gradient is the sum over
        the subtree, computed level by level from the deepest one.
        """
        if self.is_plain:
            return
        for parents, children, offsets in self._levels:
            grad_held.index_add_(
                0, parents, embedding_bag(children, grad_held, offsets, mode="sum")
            )
        if self.has_boundary:
            below = grad_held.new_zeros((len(self._chain), grad_held.shape[1]))
            below.index_add_(0, self._orphan_chain_position, grad_held[self._orphans])
            grad_held.index_add_(0, *self.boundary_gradients(below, group))
        if self.damping:
            grad_held[self.inner_nodes] *= self.inner_scale.to(grad_held.dtype)

    def boundary_gradients(
        self, below: Tensor, group: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        """Send the gradients of boundary nodes to the ranks that hold them (collective).

        `below` [m, d] contains, for each ancestor of this rank's first node, the sum over its
        children on this rank. Returns the nodes of this rank that are boundary nodes, and the sums
        of their gradients over all ranks.

        In the example in the module docstring, `below` of rank 1 is (g5, g4) for the boundary nodes
        (0, 1), and its suffix sums (g5 + g4, g4) are their gradients from the classes of rank 1.
        """
        grad = below.new_zeros((len(self._boundary), below.shape[1]))
        grad[self._chain] = below.flip(0).cumsum(0).flip(0)  # suffix sums, the root first
        all_reduce_sum(grad, group)
        return self._boundary_local, grad[self._boundary_mine]

    def _block(self, positions: slice | Tensor) -> ClassBlock:
        class_ids = self.held.class_ids[positions]
        if self.is_plain:
            return ClassBlock(positions, class_ids)
        if isinstance(positions, slice):
            first, last = self._path_ends[[positions.start, positions.stop]]
            paths = self._paths[first:last]
            offsets = self._path_starts[positions] - first
        else:
            # Concatenate the paths of the chosen classes.
            lengths, starts = self._path_lengths[positions], self._path_starts[positions]
            offsets = lengths.cumsum(0) - lengths
            shift = torch.repeat_interleave(starts - offsets, lengths)
            paths = self._paths[shift + torch.arange(len(shift), device=self.device)]
        offsets = offsets.to(paths.dtype)
        return ClassBlock(positions, class_ids, paths, offsets, self._num_remote[positions])

    def _plan_paths(self, nodes: np.ndarray) -> None:
        """Plan the path of each class's node, root first, restricted to nodes of this rank."""
        tree, start = self.tree, self.start
        lengths, remote = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        # Walk up all paths at the same time, until each one leaves this rank at `above`.
        above = nodes
        while (inside := above >= start).any():
            lengths += inside
            above = np.where(inside, tree.parent[above], above)
        remote[above >= 0] = tree.depth[above[above >= 0]] + 1
        ends = np.append(0, lengths.cumsum())
        paths = np.empty(ends[-1], np.int32 if self.num_held < 2**31 else np.int64)
        node, position = nodes.copy(), ends[1:] - 1
        while len(node):
            paths[position] = node - start
            node, position = tree.parent[node], position - 1
            inside = node >= start
            node, position = node[inside], position[inside]
        self._paths = torch.from_numpy(paths).to(self.device)
        self._path_ends = ends  # on the host, so that slicing does not synchronize with the device
        self._path_starts = self._to_device(ends[:-1])
        self._path_lengths = self._to_device(lengths)
        self._longest_path = int(lengths.max(initial=0))
        self._num_remote = self._to_device(remote)
        self.node_of_position = self._to_device(nodes - start)

    def _plan_gradients(self, group_size: int) -> None:
        tree, start, stop = self.tree, self.start, self.stop
        parent, depth = tree.parent[start:stop], tree.depth[start:stop]
        local = np.arange(stop - start)
        self._pseudoclasses = self._to_device(local[tree.class_of_node[start:stop] < 0])
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []
        by_depth = np.argsort(depth, kind="stable")
        edges = np.cumsum(np.bincount(depth)) if len(depth) else depth
        for level in reversed(np.split(by_depth, edges[:-1])):
            # In pre-order, the children of a parent are consecutive among the nodes of a level.
            children = level[parent[level] >= start]
            self._levels.extend(self._sum_plans(children, parent - start))
        inner = local[tree.has_children[start:stop]]
        self.inner_nodes = self._to_device(inner)
        below = torch.from_numpy(tree.num_classes_below()[start:stop][inner]).to(self.device)
        self.inner_scale = below.unsqueeze(1).double() ** -self.damping
        self._plan_boundary(group_size)

    def _sum_plans(
        self, children: np.ndarray, parent: np.ndarray
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield parents, their concatenated children, and the offset of each parent's children."""
        first = np.flatnonzero(np.diff(parent[children], prepend=-1))
        for start in range(0, len(first), _PARENTS_AT_ONCE):
            begin = first[start : start + _PARENTS_AT_ONCE]
            stop = first[start + _PARENTS_AT_ONCE] if start + len(begin) < len(first) else None
            yield (
                self._to_device(parent[children[begin]]),
                self._to_device(children[begin[0] : stop]),
                self._to_device(begin - begin[0]),
            )

    def _plan_boundary(self, group_size: int) -> None:
        """Plan the exchange of boundary nodes, which some rank needs and another rank holds.

        `_boundary_mine` selects the nodes that this rank holds, and `_chain` the nodes that it
        needs, which are the ancestors of its first node. `_orphans` are the nodes of this rank
        whose parents are on the chain.
        """
        tree = self.tree
        # All ancestors of the first nodes of all ranks.
        starts = [shard_range(tree.num_nodes, rank, group_size) for rank in range(1, group_size)]
        paths: Sequence[np.ndarray] = [tree.ancestors(a) for a, b in starts if b > a]
        self._boundary = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *paths]))
        mine = (self._boundary >= self.start) & (self._boundary < self.stop)
        self._boundary_mine = self._to_device(np.flatnonzero(mine))
        self._boundary_local = self._to_device(self._boundary[mine] - self.start)
        chain = tree.ancestors(self.start) if self.num_held else np.empty(0, np.int64)
        self._chain = self._to_device(np.searchsorted(self._boundary, chain))
        parent = tree.parent[self.start : self.stop]
        orphans = np.flatnonzero((parent >= 0) & (parent < self.start))
        self._orphans = self._to_device(orphans)
        self._orphan_chain_position = self._to_device(np.searchsorted(chain, parent[orphans]))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.int64)).to(self.device)
