"""Label trees: numbering, validation and derived arrays."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.tree import LabelTree


def random_forest(seed: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """A forest with arbitrary node numbers, in which all leaves and some inner nodes have a
    class."""
    rng = np.random.default_rng(seed)
    parent = np.array([rng.integers(-1, i) if i else -1 for i in range(num_nodes)])
    leaf = np.bincount(parent[parent >= 0], minlength=num_nodes) == 0
    carries = leaf | (rng.random(num_nodes) < 0.3)
    classes = np.full(num_nodes, -1)
    classes[carries] = rng.permutation(carries.sum())
    return renumbered(parent, classes, rng.permutation(num_nodes))


def renumbered(parent, classes, new_number) -> tuple[np.ndarray, np.ndarray]:
    new_parent, new_classes = np.empty_like(parent), np.empty_like(classes)
    new_parent[new_number] = np.where(parent < 0, -1, new_number[parent])
    new_classes[new_number] = classes
    return new_parent, new_classes


def naive_preorder(parent: np.ndarray, classes: np.ndarray) -> tuple[list[int], list[int]]:
    """The recursive definition: (parents, classes) of the nodes in canonical pre-order."""

    def children(node: int) -> list[int]:
        found = [i for i, p in enumerate(parent) if p == node]
        return sorted(found, key=least)

    def least(node: int) -> int:
        own = [classes[node]] if classes[node] >= 0 else []
        return min(own + [least(i) for i, p in enumerate(parent) if p == node])

    new_parent: list[int] = []
    new_classes: list[int] = []

    def visit(node: int, above: int) -> None:
        number = len(new_parent)
        new_parent.append(above)
        new_classes.append(classes[node])
        for child in children(node):
            visit(child, number)

    for root in children(-1):
        visit(root, -1)
    return new_parent, new_classes


def naive_path(parent, node: int) -> list[int]:
    path: list[int] = []
    while parent[node] >= 0:
        node = parent[node]
        path.insert(0, node)
    return path


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 25))
def test_from_parents_numbers_nodes_in_canonical_depth_first_pre_order(seed, num_nodes):
    parent, classes = random_forest(seed, num_nodes)
    tree = LabelTree.from_parents(parent, classes)
    expected_parent, expected_classes = naive_preorder(parent, classes)
    assert tree.parent.tolist() == expected_parent
    assert tree.class_of_node.tolist() == expected_classes


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), num_nodes=st.integers(1, 60))
def test_derived_arrays_equal_their_definitions(seed, num_nodes):
    tree = LabelTree.from_parents(*random_forest(seed, num_nodes))
    parent = tree.parent.tolist()
    nodes = range(num_nodes)
    assert tree.num_nodes == num_nodes
    assert tree.depth.tolist() == [len(naive_path(parent, i)) for i in nodes]
    assert tree.num_children().tolist() == [parent.count(i) for i in nodes]
    assert tree.has_children.tolist() == [i in parent for i in nodes]
    assert [tree.ancestors(i).tolist() for i in nodes] == [naive_path(parent, i) for i in nodes]
    assert tree.class_order.tolist() == [c for c in tree.class_of_node if c >= 0]
    assert tree.class_of_node[tree.node_of_class].tolist() == list(range(tree.num_classes))


def test_a_dense_tree_is_a_forest_of_roots_in_class_order():
    tree = LabelTree.dense(4)
    assert tree.parent.tolist() == [-1] * 4
    assert tree.class_order.tolist() == tree.node_of_class.tolist() == [0, 1, 2, 3]
    assert tree.depth.tolist() == tree.num_children().tolist() == [0] * 4
    assert tree.digest() == LabelTree.from_parents([-1] * 4, range(4)).digest()
    with pytest.raises(ValueError, match="num_classes is 0"):
        LabelTree.dense(0)


@pytest.mark.parametrize(
    ("parent", "classes", "message"),
    [
        ([], [], "at least one node"),
        ([-1, 0], [0], "one entry per node"),
        ([-1, 2], [0, 1], "node 1 has parent 2: pass a value from -1 to 1"),
        ([-1, 0, 0], [-1, 0, 2], "node 2 has class 2: pass a value from -1 to 1"),
        ([-1, 0, 0], [-1, 1, 1], "nodes 1 and 2 both have class 1"),
        ([-1, 0, 0], [-1, 0, -1], "node 2 has neither a class nor a child"),
        ([-1, 1], [0, 1], "node 1 does not reach a root"),
        ([-1.0, 0.0], [0, 1], "parent has shape .* pass one integer per node"),
    ],
)
def test_an_invalid_tree_raises_an_error_that_names_the_node(parent, classes, message):
    with pytest.raises(ValueError, match=message) as error:
        LabelTree.from_parents(parent, classes)
    assert "\n" not in str(error.value)


def test_saved_arrays_keep_a_non_canonical_order_of_siblings():
    tree = LabelTree.from_arrays({"parent": [-1, 0, 0], "class_of_node": [-1, 1, 0]})
    assert tree.class_order.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"parent": [-1]}, "'class_of_node' is missing"),
        ({"parent": [-1, 0, 0, 1], "class_of_node": [0, 1, 2, 3]}, "node 2 is not in pre-order"),
    ],
)
def test_invalid_arrays_are_rejected(arrays, message):
    with pytest.raises(ValueError, match=message):
        LabelTree.from_arrays(arrays)


def test_the_digest_identifies_a_tree_on_every_platform():
    tree = LabelTree.from_parents([-1, 0, 0], [0, 1, 2])
    content = b"kway label tree 1\0" + struct.pack("<6q", -1, 0, 0, 0, 1, 2)
    assert tree.digest() == hashlib.sha256(content).hexdigest()[:16]
    assert tree.digest() != LabelTree.from_parents([-1, 0, 1], [0, 1, 2]).digest()
    assert tree.digest() != LabelTree.from_parents([-1, 0, 0], [1, 0, 2]).digest()
