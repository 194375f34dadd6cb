"""The invariants of the cover tree, and the label trees derived from it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.tree import CoverTree, LabelTree, build_cover_tree

BASES = (1.05, 1.3, 2.0, 10.0)
CLOSE = 1 + 1e-9  # tolerance, because the tests and the code use different distance formulas


def rows_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    num, dim = int(rng.integers(1, 60)), int(rng.integers(1, 8))
    rows = rng.normal(size=(num, dim))
    match kind:
        case "clustered":
            return rows[rng.integers(0, num, 80)] + 0.01 * rng.normal(size=(80, dim))
        case "duplicated":
            return rows[rng.integers(0, num, 80)]
        case "zeros":
            return rows * (rng.random((num, 1)) < 0.6)
        case "parallel":
            return rows[rng.integers(0, num, 80)] * rng.uniform(0.1, 9, (80, 1))
        case "identical":
            return np.repeat(rows[:1], 7, axis=0)
    return rows


def unit_rows(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def distances(rows: np.ndarray, metric: str = "cosine") -> np.ndarray:
    points = unit_rows(rows) if metric == "cosine" else rows
    return np.linalg.norm(points[:, None] - points[None], axis=2)


def path(parent: np.ndarray, node: int) -> list[int]:
    """`node` and its ancestors."""
    return [node, *(path(parent, parent[node]) if parent[node] >= 0 else [])]


def check_invariants(tree: CoverTree, distance: np.ndarray) -> None:
    scaled = distance * tree.scale
    level, parent, base = tree.level, tree.center_parent, tree.base
    rounding = 1e-14 * tree.scale * max(1.0, distance.max())
    assert level[tree.root] == 0
    assert np.flatnonzero(parent < 0).tolist() == [tree.root]
    assert level.min() == 0
    assert (level == 0).sum() == 1
    if scaled.max() > rounding:
        assert scaled[tree.root].max() == pytest.approx(1 / base)
    for i in np.flatnonzero(parent >= 0):
        assert level[parent[i]] < level[i], "nesting: a parent appears before its child"
        assert scaled[i, parent[i]] <= base ** -float(level[i]) * CLOSE + rounding
        net_above = np.flatnonzero(level < level[i])
        assert scaled[i, parent[i]] <= scaled[i, net_above].min() * CLOSE + rounding
    twins = level == level.max()
    has_twins = (scaled[twins, parent[twins]] <= rounding).any()
    for net_level in np.unique(level)[: -1 if has_twins else None]:
        net = np.flatnonzero(level <= net_level)
        radius = base ** -(net_level + 1.0)
        apart = scaled[np.ix_(net, net)] + np.diag(np.full(len(net), np.inf))
        assert apart.min() * CLOSE > radius, "separation"
        assert scaled[:, net].min(1).max() <= radius * CLOSE + rounding, "covering"


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["random", "clustered", "duplicated", "zeros", "parallel", "identical"]),
    base=st.sampled_from(BASES),
    metric=st.sampled_from(["cosine", "euclidean"]),
)
def test_nets_are_nested_separated_and_covering_and_parents_are_nearest(seed, kind, base, metric):
    rows = rows_of(kind, np.random.default_rng(seed))
    tree = build_cover_tree(rows, base=base, metric=metric)
    assert len(tree.level) == len(rows)
    check_invariants(tree, distances(rows, metric))
    check_label_trees(tree)


def naive_vtree(tree: CoverTree) -> dict[object, object]:
    """The parent of each class and pseudoclass in the explicit tree without one-child nodes."""
    explicit: dict[object, object] = {}
    bottom = int(tree.level.max()) + 1
    for c, first in enumerate(tree.level):
        above = int(tree.center_parent[c])
        explicit[(c, int(first))] = (above, int(first) - 1) if above >= 0 else None
        for level in range(int(first) + 1, bottom + 1):
            explicit[(c, level)] = (c, level - 1)
    children = list(explicit.values())
    inner = {node for node in explicit if children.count(node) >= 2}
    leaves = {c: (c, bottom) for c in range(len(tree.level))}

    def parent(node):
        while (node := explicit[node]) is not None and node not in inner:
            pass
        return node

    return {node: parent(node) for node in inner} | {c: parent(leaf) for c, leaf in leaves.items()}


def check_label_trees(tree: CoverTree) -> None:
    num_classes = len(tree.level)
    utree, vtree = tree.utree(), tree.vtree()
    assert utree.num_nodes == utree.num_classes == num_classes
    assert vtree.num_classes == num_classes
    assert vtree.num_nodes < 2 * num_classes
    assert sorted(vtree.class_order) == list(range(num_classes))
    assert np.array_equal(vtree.has_children, vtree.class_of_node < 0), "classes are the leaves"
    assert (vtree.num_children()[vtree.class_of_node < 0] >= 2).all()
    for c in range(num_classes):
        nodes = utree.ancestors(int(utree.node_of_class[c]))
        assert utree.class_of_node[nodes].tolist() == path(tree.center_parent, c)[:0:-1]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["random", "clustered", "duplicated", "identical"]),
    base=st.sampled_from(BASES[1:]),
)
def test_vtree_is_the_explicit_cover_tree_without_its_one_child_nodes(seed, kind, base):
    tree = build_cover_tree(rows_of(kind, np.random.default_rng(seed))[:25], base=base)
    naive = naive_vtree(tree)
    number = {node: i for i, node in enumerate(naive)}
    expected = LabelTree.from_parents(
        [number[above] if above is not None else -1 for above in naive.values()],
        [node if isinstance(node, int) else -1 for node in naive],
    )
    assert tree.vtree().digest() == expected.digest()


def test_one_class_is_one_node():
    tree = build_cover_tree([[3.0, 4.0]])
    assert tree.center_parent.tolist() == [-1]
    assert tree.level.tolist() == [0]
    for label_tree in (tree.utree(), tree.vtree()):
        assert label_tree.parent.tolist() == [-1]
        assert label_tree.class_of_node.tolist() == [0]


def test_a_duplicate_is_a_child_of_the_equal_class_one_level_below_all_others():
    tree = build_cover_tree([[0.0], [8.0], [1.0], [8.0]], base=2, metric="euclidean")
    assert tree.center_parent.tolist() == [2, 2, -1, 1]
    assert tree.level.tolist() == [3, 1, 0, 4]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_parallel_vectors_are_equal_under_the_cosine_metric_in_every_dtype(dtype):
    rng = np.random.default_rng(1)
    directions = rng.normal(size=(10, 50))
    rows = (directions[np.arange(40) % 10] * rng.uniform(0.5, 3, (40, 1))).astype(dtype)
    tree = build_cover_tree(rows)
    twins = np.flatnonzero(tree.level == tree.level.max())
    assert len(twins) == 30
    assert (tree.center_parent[twins] % 10 == twins % 10).all()


def test_ties_go_to_the_lowest_class_id():
    square = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    tree = build_cover_tree(square, metric="euclidean")
    assert tree.root == 0
    assert tree.level.tolist() == [0, 2, 2, 1]
    assert tree.center_parent.tolist() == [-1, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([[1.0], [np.nan]], {}, "class 1 contains NaN"),
        (np.ones((0, 3)), {}, "shape"),
        (np.array([["a"]]), {}, "real numbers"),
        ([[1.0]], {"base": 1.0}, "base is 1.0"),
        ([[1.0]], {"metric": "manhattan"}, "'manhattan': use cosine or euclidean"),
    ],
)
def test_invalid_input_is_rejected(rows, options, message):
    with pytest.raises(ValueError, match=message) as error:
        build_cover_tree(rows, **options)
    assert "\n" not in str(error.value)
