"""The label tree: the parent and the class of each node.

Nodes are numbered in depth-first pre-order. So for any contiguous range of
nodes, every ancestor of a node in the range is either in the range too or an ancestor of the
range's first node.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]
AnyInts = NDArray[np.int32] | NDArray[np.int64]
NodeArray = NDArray[np.int32]  # large trees have hundreds of millions of nodes
BoolArray = NDArray[np.bool_]
_MAX_NODES = 2**31 - 1
_NODES_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class LabelTree:
    """A forest whose nodes have at most one class each; every class 0..K-1 is at exactly one node.

    `parent` [N] is -1 for a root, otherwise smaller than the node's own number. `class_of_node` [N]
    is -1 for a pseudoclass. Create a tree with `dense`, `from_parents` or `from_arrays`; the
    constructor does not check its arguments. All arrays are int32 and read-only. A dense tree takes
    4 bytes per node, because its constant arrays are broadcast from one element.
    """

    parent: NodeArray
    class_of_node: NodeArray

    @classmethod
    def dense(cls, num_classes: int) -> "LabelTree":
        """Return the forest without edges, in which every node i is a root with class i."""
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}: pass at least 1")
        _check_size(num_classes)
        return cls(_constant(-1, num_classes), _narrow(np.arange(num_classes, dtype=np.int32)))

    @classmethod
    def from_parents(cls, parent: ArrayLike, class_of_node: ArrayLike) -> "LabelTree":
        """Check a tree with arbitrary node numbers and number it in pre-order.

        `parent` [N] and `class_of_node` [N] are as in the class, but a parent may have a larger
        number than its child. Siblings, including roots, are sorted by the smallest class ID at or
        below them, so the result does not depend on the numbering of the input. Raises ValueError
        if the arrays are not a valid tree.
        """
        parents, classes = _checked(parent, class_of_node)
        least, size = _subtree_least_and_size(parents, classes)
        position = _preorder(parents, size, sibling_key=least)
        order = np.empty_like(position)
        order[position] = np.arange(len(order))
        parents = parents[order]
        return cls(_narrow(np.where(parents < 0, -1, position[parents])), _narrow(classes[order]))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, ArrayLike]) -> "LabelTree":
        """Return the tree of `arrays()`, with the same node numbers.

        Raises ValueError if the arrays are not a valid tree in pre-order.
        """
        missing = {"parent", "class_of_node"} - set(arrays)
        if missing:
            raise ValueError(f"label tree: array {min(missing)!r} is missing")
        parents, classes = _checked(arrays["parent"], arrays["class_of_node"])
        nodes = np.arange(len(parents))
        _, size = _subtree_least_and_size(parents, classes)
        wrong = np.flatnonzero(_preorder(parents, size, sibling_key=nodes) != nodes)
        if wrong.size:
            raise ValueError(
                f"label tree: node {wrong[0]} is not in pre-order: use LabelTree.from_parents"
            )
        return cls(_narrow(parents), _narrow(classes))

    def arrays(self) -> dict[str, IntArray]:
        """Return `parent` [N] and `class_of_node` [N] as int64, the input of `from_arrays`."""
        return {name: getattr(self, name).astype(np.int64) for name in ("parent", "class_of_node")}

    @cached_property
    def num_nodes(self) -> int:
        return len(self.parent)

    @cached_property
    def num_classes(self) -> int:
        return len(self.class_order)

    @cached_property
    def is_flat(self) -> bool:
        """Whether every node is a root."""
        return self.parent.strides == (0,) or not (self.parent >= 0).any()

    @cached_property
    def is_dense(self) -> bool:
        """Whether every node i is a root with class i."""
        return self.is_flat and bool((np.diff(self.class_of_node) == 1).all())

    @cached_property
    def class_order(self) -> NodeArray:
        """Class IDs [K] in the order of their nodes."""
        is_class = self.class_of_node >= 0
        return self.class_of_node if is_class.all() else _narrow(self.class_of_node[is_class])

    @cached_property
    def node_of_class(self) -> NodeArray:
        """The node [K] of each class."""
        if self.is_dense:
            return self.class_of_node
        nodes = np.empty(self.num_classes, np.int32)
        nodes[self.class_order] = np.flatnonzero(self.class_of_node >= 0)
        return _narrow(nodes)

    @cached_property
    def depth(self) -> NodeArray:
        """Number of edges [N] between each node and its root."""
        if self.is_flat:
            return _constant(0, self.num_nodes)
        return _narrow(_sums_to_root(self.parent, self.parent >= 0))

    def num_children(self) -> IntArray:
        """Return the number of children [N] of each node."""
        return np.bincount(self.parent[self.parent >= 0], minlength=self.num_nodes)

    @cached_property
    def has_children(self) -> BoolArray:
        """Whether each node [N] is an inner node."""
        if self.is_flat:
            return np.broadcast_to(np.False_, self.num_nodes)
        inner = np.zeros(self.num_nodes, np.bool_)
        inner[self.parent[self.parent >= 0]] = True
        inner.flags.writeable = False
        return inner

    def num_classes_below(self) -> NodeArray:
        """Return the number of classes [N] at or below each node."""
        if self.is_flat:
            return _constant(1, self.num_nodes)
        below = (self.class_of_node >= 0).astype(np.int32)
        # In pre-order, all descendants of a node have larger numbers, so the nodes are added to
        # their parents from the last one to the first, and within a block by depth.
        for start in reversed(range(0, self.num_nodes, _NODES_AT_ONCE)):
            depth = self.depth[start : start + _NODES_AT_ONCE]
            for level in range(depth.max(), 0, -1):
                nodes = start + np.flatnonzero(depth == level)
                np.add.at(below, self.parent[nodes], below[nodes])
        return _narrow(below)

    def ancestors(self, node: int) -> IntArray:
        """Return the nodes above `node`, root first, without `node` itself."""
        if not 0 <= node < self.num_nodes:
            raise ValueError(
                f"node {node} is not in the label tree: pass a node from 0 to {self.num_nodes - 1}"
            )
        path: list[int] = []
        while (node := int(self.parent[node])) >= 0:
            path.append(node)
        return np.array(path[::-1], np.int64)

    def digest(self) -> str:
        """Return 16 hexadecimal digits of a SHA-256 of both arrays, the same on every platform."""
        sha = hashlib.sha256(b"kway label tree 1\0")
        for array in (self.parent, self.class_of_node):
            for start in range(0, len(array), _NODES_AT_ONCE):
                sha.update(array[start : start + _NODES_AT_ONCE].astype("<i8").data)
        return sha.hexdigest()[:16]


def preorder(parent: ArrayLike) -> IntArray:
    """Return the nodes in the order in which `LabelTree.from_parents` numbers them.

    The nodes must be the classes 0..K-1, followed by pseudoclasses, each of which is above a class.
    Indexing names or vectors of the nodes with the result puts them in the node order of the tree.
    """
    # Treat pseudoclasses as additional classes. They do not change the order of siblings, because
    # the smallest class ID at or below a node is always that of a real class.
    return LabelTree.from_parents(parent, np.arange(np.size(parent))).class_of_node.astype(np.int64)


def _narrow(values: AnyInts) -> NodeArray:
    narrow = values.astype(np.int32, copy=False)
    narrow.flags.writeable = False
    return narrow


def _constant(value: int, size: int) -> NodeArray:
    return np.broadcast_to(np.int32(value), size)


def _check_size(num_nodes: int) -> None:
    if num_nodes > _MAX_NODES:
        raise ValueError(f"label tree: {num_nodes} nodes, over the limit of {_MAX_NODES}")


def _checked(parent: ArrayLike, class_of_node: ArrayLike) -> tuple[IntArray, IntArray]:
    parents, classes = _indices(parent, "parent"), _indices(class_of_node, "class_of_node")
    num_nodes = len(parents)
    if len(classes) != num_nodes or num_nodes == 0:
        raise ValueError(
            f"label tree: parent has {num_nodes} entries and class_of_node has {len(classes)}: "
            "pass one entry per node in both, for at least one node"
        )
    _check_size(num_nodes)
    for name, values, end in (
        ("parent", parents, num_nodes),
        ("class", classes, int(np.count_nonzero(classes >= 0))),
    ):
        wrong = np.flatnonzero((values < -1) | (values >= end))
        if wrong.size:
            raise ValueError(
                f"label tree: node {wrong[0]} has {name} {values[wrong[0]]}: pass a value from -1 "
                f"to {end - 1}"
            )
    nodes = np.flatnonzero(classes >= 0)
    order = nodes[np.argsort(classes[nodes], kind="stable")]
    twice = np.flatnonzero(np.diff(classes[order]) == 0)
    if twice.size:
        first, second = order[twice[0]], order[twice[0] + 1]
        raise ValueError(
            f"label tree: nodes {first} and {second} both have class {classes[first]}: "
            "assign each class to one node"
        )
    childless = np.bincount(parents[parents >= 0], minlength=num_nodes) == 0
    barren = np.flatnonzero(childless & (classes < 0))
    if barren.size:
        raise ValueError(f"label tree: node {barren[0]} has neither a class nor a child: remove it")
    _sums_to_root(parents, parents >= 0)
    return parents, classes


def _indices(values: ArrayLike, name: str) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"label tree: {name} has shape {array.shape} and dtype {array.dtype}: "
            "pass one integer per node"
        )
    return array.astype(np.int64)


def _sums_to_root(parents: AnyInts, values: NDArray) -> IntArray:
    """Return the sums [N] of `values` over each node and its ancestors, in O(N log depth).

    This uses pointer doubling: the sum of a node covers its next 1, 2, 4, ... nodes upward, and
    `jump` is the first node not yet covered. Node N is the end of every path and has the value 0.
    """
    num_nodes = len(parents)
    jump = np.append(np.where(parents < 0, num_nodes, parents), num_nodes)
    sums = np.append(values.astype(np.int64), 0)
    for _ in range(num_nodes.bit_length()):
        if (jump == num_nodes).all():
            break
        sums += sums[jump]
        jump = jump[jump]
    cyclic = np.flatnonzero(jump != num_nodes)
    if cyclic.size:
        raise ValueError(
            f"label tree: node {cyclic[0]} does not reach a root, because its ancestors form a "
            "cycle: correct its parents"
        )
    return sums[:-1]


def _subtree_least_and_size(parents: AnyInts, classes: AnyInts) -> tuple[IntArray, IntArray]:
    """Return the smallest class ID and the number of nodes at or below each node, both [N]."""
    num_nodes = len(parents)
    least = np.where(classes < 0, num_nodes, classes)
    size = np.ones(num_nodes, np.int64)
    depth = _sums_to_root(parents, parents >= 0)
    by_depth = np.argsort(depth, kind="stable")
    ends = np.cumsum(np.bincount(depth))
    for start, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
        nodes = by_depth[start:end]
        np.minimum.at(least, parents[nodes], least[nodes])
        np.add.at(size, parents[nodes], size[nodes])
    return least, size


def _preorder(parents: IntArray, size: IntArray, *, sibling_key: IntArray) -> IntArray:
    """Return the pre-order number [N] of each node, with siblings sorted by `sibling_key`.

    The number of a node is the number of its parent, plus 1, plus the sizes of the subtrees of its
    preceding siblings. It is therefore a sum of such offsets over the node and its ancestors.
    """
    order = np.lexsort((sibling_key, parents))
    before = np.cumsum(size[order]) - size[order]
    first = np.flatnonzero(np.diff(parents[order], prepend=-2))
    family = np.diff(np.append(first, len(order)))
    offset = np.empty_like(size)
    offset[order] = before - np.repeat(before[first], family)
    return _sums_to_root(parents, offset + (parents >= 0))
