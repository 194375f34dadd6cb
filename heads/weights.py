"""Class weights: which node vectors a rank holds, and how they add up to rows of classes.

One structure serves dense, U-tree and V-tree weights: w_class is the sum of the node vectors on the
path to the root (paper 000, eq 3). Nodes are numbered in depth-first pre-order and sharded
contiguously, as `Shard(0)` does; then the only vectors that a rank's classes need and it does not
hold are the ancestors of its first node, its boundary.

For example, eight nodes on two ranks. The first node of rank 1 is 4; its ancestors are 0 and 1:

    node      0  1  2  3   4  5  6  7
    parent    -  0  1  1   1  0  5  5
    rank      0  0  0  0   1  1  1  1

A path of rank 1 begins with the first few of these ancestors and continues with nodes that rank 1
holds: 0 1 | 4, and 0 | 5 6, and 0 | 5 7. So a row is the sum over the held part of its path plus
one of the prefix sums 0, v0 and v0 + v1. Forward all-reduces the vectors of the boundary nodes of
all ranks, at most `depth` per rank, and each rank takes the prefix sums of its own.

Backward sums the gradients of rows over subtrees, from the deepest level up. Node 4 and node 5 have
parents on another rank: their sums are added up along the boundary from below, so node 1 gets that
of node 4 and node 0 those of both, and one all-reduce returns them to the rank that holds 0 and 1.
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
from heads.tree import LabelTree

# Parents whose children are summed together: bounds the memory in addition to the gradient.
_PARENTS_AT_ONCE = 8192
# Every class keeps its path: far deeper than any label tree, far below what memory holds.
_DEEPEST = 1000

# Shape legend: N nodes, n nodes of this rank, C classes of a block, d features, M boundary nodes.


def shard_range(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """The contiguous range of rows that `Shard(0)` gives to a rank; trailing ranks may be empty."""
    chunk = -(-num_rows // size)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


@dataclass(frozen=True)
class ClassBlock:
    """Some of a rank's classes: their positions among these (ascending) and their ids [C].

    `paths` are the nodes of their paths that this rank holds, class after class, and `offsets` [C]
    where each path begins; None where every class is a node without parent. `num_remote` [C] counts
    the nodes of a path that other ranks hold. `weights` as in `Choice`.
    """

    positions: slice | Tensor
    class_ids: Tensor
    paths: Tensor | None = None
    offsets: Tensor | None = None
    num_remote: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class NodeValues:
    """What belongs to the nodes of a rank: `held` [n, d], d = 1 for the bias.

    `boundary` [m + 1, d] are the sums of the first 0..m of the m ancestors of the rank's first node
    that other ranks hold, root first.
    """

    held: Tensor
    boundary: Tensor


class ClassWeights:
    """The part of a label tree's node matrix V [N, d] that one rank holds: rows `start:stop`.

    Everything here is index arithmetic; the values are passed in by the head: node vectors [n, d],
    or the bias as [n, 1]. With `damping` p the gradient of an inner node, a sum over the classes
    below it, is divided by their number to the power p. Raises ValueError for a tree that is deeper
    than any label tree.
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
                f"the label tree is {tree.depth.max()} levels deep: give one of at most {_DEEPEST}"
            )
        self.tree, self.device, self.damping = tree, device, damping
        self.group_rank, self.group_size = group_rank, group_size
        self.tree_digest = int(tree.digest()[:8], 16)
        self.start, self.stop = shard_range(tree.num_nodes, group_rank, group_size)
        first, last = np.cumsum(np.append(0, tree.class_of_node >= 0))[[self.start, self.stop]]
        self.held = HeldClasses(
            class_ids=self._to_device(tree.class_order[first:last]),
            position=self._to_device(_inverse(tree.class_order)),
            first=int(first),
        )
        self._plain = not (tree.parent >= 0).any()
        if not self._plain:
            self._plan_paths(tree.node_of_class[tree.class_order[first:last]])
            self._plan_gradients(group_size)

    def again(self, tree: LabelTree, device: torch.device) -> "ClassWeights":
        """The same rank's part of another tree, or for vectors on another device."""
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
    def is_plain(self) -> bool:
        """Every node is a class and a root: class rows are the held vectors as they lie."""
        return self._plain

    def blocks(self, classes_at_once: int, choice: Choice | None = None) -> Iterator[ClassBlock]:
        """This rank's classes, or those that a loss chose, `classes_at_once` a block."""
        num = len(self.held.class_ids) if choice is None else len(choice.positions)
        for start in range(0, num, classes_at_once):
            part = slice(start, min(start + classes_at_once, num))
            if choice is None:
                yield self._block(part)
            else:
                weights = None if choice.weights is None else choice.weights[part]
                yield replace(self._block(choice.positions[part]), weights=weights)

    def columns(self, block: ClassBlock, labels: Tensor) -> Tensor:
        """The labels' columns [b] in a block, outside 0..C-1 for a label that is elsewhere."""
        positions = self.held.position[labels] - self.held.first
        if isinstance(block.positions, slice):
            return positions - block.positions.start
        columns = torch.searchsorted(block.positions, positions).clamp_(
            max=len(block.positions) - 1
        )
        return torch.where(block.positions[columns] == positions, columns, -1)

    def with_boundary(self, held: Tensor, group: ProcessGroup | None) -> NodeValues:
        """Held values [n, d] and what their path sums need of other ranks (collective)."""
        if self._plain or not len(self._boundary):
            return NodeValues(held, held.new_zeros((1, held.shape[1])))
        rows = held.new_zeros((len(self._boundary), held.shape[1]))
        rows[self._boundary_mine] = held[self._boundary_local]
        chain = all_reduce_sum(rows, group)[self._chain]
        return NodeValues(held, torch.cat([torch.zeros_like(rows[:1]), chain.cumsum(0)]))

    def rows(self, block: ClassBlock, values: NodeValues) -> Tensor:
        """Class rows [C, d] of a block: the values along each path, summed in one pass.

        In blocks that fit a cache this costs no more than a copy, whatever the batch: summing
        logits down the tree instead would multiply every inner node with the features.
        """
        if block.paths is None:
            return values.held[block.positions]
        rows = embedding_bag(block.paths, values.held, block.offsets, mode="sum")
        boundary = values.boundary
        return rows if len(boundary) == 1 else rows + boundary[block.num_remote]

    def gradient_like(self, held: Tensor, dtype: torch.dtype, *, every_class: bool) -> Tensor:
        """A gradient [n, d] to put the rows of blocks into, zero where none will be put."""
        if not every_class:
            return torch.zeros_like(held, dtype=dtype)
        grad = torch.empty_like(held, dtype=dtype)
        if not self._plain:
            grad.index_fill_(0, self._pseudoclasses, 0)
        return grad

    def contiguous_part(self, block: ClassBlock, grad_held: Tensor) -> Tensor | None:
        """The part of `grad_held` that the gradient of a block's rows is, if it is contiguous."""
        whole = self._plain and isinstance(block.positions, slice)
        return grad_held[block.positions] if whole else None

    def put_gradient(self, block: ClassBlock, grad_rows: Tensor, grad_held: Tensor) -> None:
        """Put the gradient [C, d] of a block's class rows where its classes' nodes are."""
        positions = block.positions if self._plain else self._node_of_position[block.positions]
        grad_held[positions] = grad_rows.to(grad_held.dtype)

    def sum_gradients(self, grad_held: Tensor, group: ProcessGroup | None) -> None:
        """Turn gradients of class rows into those of node vectors: each node's is the sum over its
        subtree, level by level from the deepest (collective)."""
        if self._plain:
            return
        for parents, children, offsets in self._levels:
            grad_held.index_add_(
                0, parents, embedding_bag(children, grad_held, offsets, mode="sum")
            )
        if len(self._boundary):
            self._return_boundary(grad_held, group)
        if self.damping:
            grad_held[self._inner] *= self._inner_scale.to(grad_held.dtype)

    def _return_boundary(self, grad_held: Tensor, group: ProcessGroup | None) -> None:
        """Add what each rank's classes give to the vectors that other ranks hold (collective)."""
        below = grad_held.new_zeros((len(self._chain), grad_held.shape[1]))
        below.index_add_(0, self._orphan_chain_position, grad_held[self._orphans])
        grad = grad_held.new_zeros((len(self._boundary), grad_held.shape[1]))
        grad[self._chain] = below.flip(0).cumsum(0).flip(0)
        all_reduce_sum(grad, group)
        grad_held.index_add_(0, self._boundary_local, grad[self._boundary_mine])

    def _block(self, positions: slice | Tensor) -> ClassBlock:
        class_ids = self.held.class_ids[positions]
        if self._plain:
            return ClassBlock(positions, class_ids)
        if isinstance(positions, slice):
            first, last = self._path_ends[[positions.start, positions.stop]]
            paths = self._paths[first:last]
            offsets = self._path_starts[positions] - first
        else:
            paths, offsets = _ragged(self._paths, self._path_starts, self._path_lengths, positions)
        offsets = offsets.to(paths.dtype)
        return ClassBlock(positions, class_ids, paths, offsets, self._num_remote[positions])

    def _plan_paths(self, nodes: np.ndarray) -> None:
        """The path of each class's node, root first, as far as this rank holds it."""
        tree, start = self.tree, self.start
        first_held, remote = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        above = nodes
        while (inside := above >= start).any():
            first_held += inside
            above = np.where(inside, tree.parent[above], above)
        lengths = first_held
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
        self._path_ends = ends  # on the host: slicing waits for no device
        self._path_starts = self._to_device(ends[:-1])
        self._path_lengths = self._to_device(lengths)
        self._num_remote = self._to_device(remote)
        self._node_of_position = self._to_device(nodes - start)

    def _plan_gradients(self, group_size: int) -> None:
        tree, start, stop = self.tree, self.start, self.stop
        parent, depth = tree.parent[start:stop], tree.depth[start:stop]
        local = np.arange(stop - start)
        self._pseudoclasses = self._to_device(local[tree.class_of_node[start:stop] < 0])
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []
        by_depth = np.argsort(depth, kind="stable")
        edges = np.cumsum(np.bincount(depth)) if len(depth) else depth
        for level in reversed(np.split(by_depth, edges[:-1])):
            # In pre-order the children of one parent follow one another among those of a level.
            children = level[parent[level] >= start]
            self._levels.extend(self._sum_plans(children, parent - start))
        inner = local[tree.has_children[start:stop]]
        self._inner = self._to_device(inner)
        below = torch.from_numpy(tree.num_classes_below[start:stop][inner]).to(self.device)
        self._inner_scale = below.unsqueeze(1).double() ** -self.damping
        self._plan_boundary(group_size)

    def _sum_plans(
        self, children: np.ndarray, parent: np.ndarray
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Parents, their children one parent after another, and where each one's begin."""
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
        """The nodes that some rank needs and another holds; which of them this rank holds, which it
        needs (its chain), and its nodes whose parents are on that chain."""
        tree = self.tree
        self._boundary = _boundary_nodes(tree, group_size)
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


def _ragged(
    values: Tensor, starts: Tensor, lengths: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The pieces of `values` at `positions`, one after another, and where each begins."""
    wanted = lengths[positions]
    offsets = wanted.cumsum(0) - wanted
    shift = torch.repeat_interleave(starts[positions] - offsets, wanted)
    return values[shift + torch.arange(len(shift), device=values.device)], offsets


def _boundary_nodes(tree: LabelTree, group_size: int) -> np.ndarray:
    """Sorted ids of the ancestors that any rank's first node has on ranks before it."""
    starts = [shard_range(tree.num_nodes, rank, group_size) for rank in range(1, group_size)]
    paths: Sequence[np.ndarray] = [tree.ancestors(a) for a, b in starts if b > a]
    return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *paths]))


def _inverse(permutation: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
