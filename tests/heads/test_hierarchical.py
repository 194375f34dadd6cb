"""Loss, gradients and probabilities of hierarchical softmax match their definition, including when
sharded."""

import numpy as np
import pytest
import torch

from heads import LabelTree
from heads.hierarchical import HierarchicalSoftmaxHead, classes_at_leaves
from tests.heads.cases import gradient_of_nodes, label_tree, set_nodes
from tests.ranks import rank_mesh, run_on_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def problem(tree: LabelTree, num_rows: int, dim: int):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(tree.num_classes, (num_rows,), generator=generator)
    nodes = torch.randn(tree.num_nodes, dim + 1, generator=generator, dtype=torch.float64)
    return features, labels, nodes


def naive_log_probabilities(tree: LabelTree, features, nodes):
    """The log-probability of every class, as a product of softmaxes, one node at a time."""
    x = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], 1)
    z = x @ nodes.T
    columns = []
    for class_id in range(tree.num_classes):
        node = int(np.flatnonzero(tree.class_of_node == class_id)[0])
        log_p = torch.zeros(len(x), dtype=x.dtype)
        while node >= 0:
            siblings = np.flatnonzero(tree.parent == tree.parent[node])
            log_p = log_p + z[:, node] - z[:, siblings].exp().sum(1).log()
            node = int(tree.parent[node])
        columns.append(log_p)
    return torch.stack(columns, 1)


def make_head(weighting: str, num_classes: int, dim: int, mesh=None, **options):
    tree = label_tree(weighting, num_classes)
    head = HierarchicalSoftmaxHead(dim, tree, mesh=mesh, dtype=torch.float64, **options)
    features, labels, nodes = problem(head.label_tree, 11, dim)
    set_nodes(head, nodes)
    return head, features, labels, nodes


def expected(weighting: str, num_classes: int, dim: int):
    tree = classes_at_leaves(label_tree(weighting, num_classes))
    features, labels, nodes = problem(tree, 11, dim)
    features.requires_grad_()
    nodes.requires_grad_()
    log_p = naive_log_probabilities(tree, features, nodes)
    loss = -log_p[torch.arange(11), labels].mean()
    loss.backward()
    return float(loss.detach()), features.grad.numpy(), nodes.grad.numpy(), log_p.detach().numpy()


def results(weighting: str, num_classes: int, dim: int, blocks: bool, sharded: bool):
    mesh = None
    begin, end = 0, 11
    if sharded:
        mesh = rank_mesh()
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        begin, end = 11 * rank // world, 11 * (rank + 1) // world
    head, features, labels, _ = make_head(weighting, num_classes, dim, mesh)
    if blocks:
        object.__setattr__(head.engine, "memory_bytes", 1)
    mine = features[begin:end].clone().requires_grad_()
    loss = head(mine, labels[begin:end])
    loss.backward()
    at_once = 7 if blocks else 4096
    scores = [
        (block.class_ids.numpy(), block.scores.numpy())
        for block in head.score_blocks(features, at_once)
    ]
    where = (begin, end), (head.engine.weights.start, head.engine.weights.stop)
    return float(loss.detach()), mine.grad.numpy(), gradient_of_nodes(head).numpy(), scores, where


def sharded_results(num_classes: int):
    return {
        weighting: results(weighting, num_classes, 4, blocks=True, sharded=True)
        for weighting in ("utree", "vtree")
    }


@pytest.mark.parametrize("blocks", [False, True], ids=["one block", "blocks"])
@pytest.mark.parametrize("weighting", ["utree", "vtree"])
def test_hierarchical_softmax_equals_its_definition(weighting, blocks):
    check(weighting, 70, [results(weighting, 70, 4, blocks, sharded=False)])


@pytest.mark.parametrize(("world_size", "num_classes"), [(3, 13), (4, 2)], ids=str)
def test_sharded_hierarchical_softmax_equals_its_definition(world_size, num_classes):
    ranks = run_on_ranks(world_size, sharded_results, num_classes)
    for weighting in ranks[0]:
        check(weighting, num_classes, [found[weighting] for found in ranks])


def check(weighting: str, num_classes: int, ranks) -> None:
    loss, by_features, by_nodes, log_p = expected(weighting, num_classes, 4)
    seen = []
    for got_loss, got_features, got_nodes, scores, ((begin, end), (start, stop)) in ranks:
        np.testing.assert_allclose(got_loss, loss, **EXACT)
        np.testing.assert_allclose(got_features, by_features[begin:end], **EXACT)
        np.testing.assert_allclose(got_nodes, by_nodes[start:stop], **EXACT)
        for class_ids, values in scores:
            np.testing.assert_allclose(values, log_p[:, class_ids], **EXACT)
            seen.extend(class_ids.tolist())
    assert sorted(seen) == list(range(num_classes))


def test_labels_outside_the_classes_are_rejected():
    head, features, labels, _ = make_head("utree", 13, 4)
    for wrong in (-1, 13, 17):
        bad = torch.full_like(labels, 4)
        bad[0] = wrong
        with pytest.raises(ValueError, match="1 in the global batch"):
            head(features, bad)
