"""Tree weights: path sums and gradients on shallow and deep trees, on one to four ranks."""

import numpy as np
import pytest
import torch

from heads import ClassHead, LabelTree
from heads.losses import CrossEntropy
from tests.heads.cases import gradient_of_nodes, naive_logits, problem, set_nodes
from tests.ranks import rank_mesh, run_on_ranks


def random_tree(num_nodes: int, seed: int, *, deep: bool) -> LabelTree:
    """A forest with classes at all leaves and some inner nodes, in a random order."""
    rng = np.random.default_rng(seed)
    reach = 3 if deep else num_nodes
    parent = np.array(
        [i - rng.integers(1, min(i, reach) + 1) if i else -1 for i in range(num_nodes)]
    )
    parent[rng.random(num_nodes) < 0.05] = -1
    leaf = ~np.isin(np.arange(num_nodes), parent)
    carries = leaf | (rng.random(num_nodes) < 0.3)
    classes = np.full(num_nodes, -1)
    classes[carries] = rng.permutation(int(carries.sum()))
    return LabelTree.from_parents(parent, classes)


TREES = [(num, seed, deep) for num in (1, 2, 7, 61) for seed in (0, 1) for deep in (False, True)]
CHAIN = 60


def chain() -> LabelTree:
    """A single path of 61 nodes, each with a class. Its depth is 60."""
    return LabelTree.from_parents(np.arange(-1, CHAIN), np.arange(CHAIN + 1)[::-1].copy())


def trees() -> list[LabelTree]:
    return [*(random_tree(num, seed, deep=deep) for num, seed, deep in TREES), chain()]


def step_of(tree: LabelTree, mesh=None):
    """The loss, and the gradients of this rank's features (a share of 6 rows) and node vectors."""
    head = ClassHead(3, tree, CrossEntropy(), mesh=mesh, dtype=torch.float64)
    features, labels, nodes = problem(tree, num_rows=6, dim=3)
    held = slice(head.engine.weights.start, head.engine.weights.stop)
    set_nodes(head, nodes)
    rank, size = (0, 1) if mesh is None else (mesh.get_local_rank("class"), mesh["class"].size())
    rows = slice(6 * rank // size, 6 * (rank + 1) // size)
    mine = features[rows].clone().requires_grad_()
    loss = head(mine, labels[rows])
    loss.backward()
    return loss.item(), (rows, mine.grad.numpy()), (held, gradient_of_nodes(head).numpy())


def steps_on_a_rank():
    return [step_of(tree, rank_mesh()) for tree in trees()]


def check(tree: LabelTree, ranks) -> None:
    features, labels, nodes = problem(tree, num_rows=6, dim=3)
    features.requires_grad_()
    nodes.requires_grad_()
    loss = torch.nn.functional.cross_entropy(naive_logits(tree, features, nodes), labels)
    loss.backward()
    for got, (rows, by_features), (held, by_nodes) in ranks:
        np.testing.assert_allclose(got, loss.item(), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(by_features, features.grad[rows].numpy(), atol=1e-10)
        np.testing.assert_allclose(by_nodes, nodes.grad[held].numpy(), atol=1e-10)


def test_path_sums_and_gradients_equal_their_definition_on_any_tree():
    for tree in trees():
        check(tree, [step_of(tree)])


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_path_sums_equal_their_definition_on_any_tree(world_size):
    ranks = run_on_ranks(world_size, steps_on_a_rank)
    for index, tree in enumerate(trees()):
        check(tree, [answers[index] for answers in ranks])


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_damping_divides_the_gradient_of_an_inner_node_by_a_power_of_its_class_count(damping):
    tree = random_tree(61, 3, deep=True)
    features, labels, _ = problem(tree, num_rows=6, dim=3)
    grads = []
    for power in (0.0, damping):
        head = ClassHead(3, tree, CrossEntropy(), gradient_damping=power, dtype=torch.float64)
        head(features, labels).backward()
        grads.append(gradient_of_nodes(head))
    for node in range(tree.num_nodes):
        below = sum(node in (at, *tree.ancestors(int(at))) for at in tree.node_of_class)
        scale = below**-damping if tree.has_children[node] else 1
        torch.testing.assert_close(grads[1][node], grads[0][node] * scale)


def test_a_tree_that_is_too_deep_is_rejected():
    parents = np.arange(-1, 1500)
    with pytest.raises(ValueError, match="a depth of 1500"):
        ClassHead(3, LabelTree.from_parents(parents, np.arange(1501)), CrossEntropy())
