"""Sampled classes are unbiased and the same on every rank. Evaluation uses all classes."""

import numpy as np
import pytest
import torch

from heads import ClassHead
from heads.losses import CrossEntropy, DecoupledSoftmax
from heads.losses.binary_cross_entropy import NoiseContrastiveEstimation
from heads.losses.sampling import uniform
from tests.heads.cases import (
    WEIGHTINGS,
    facts,
    label_tree,
    loss_and_gradients,
    naive_logits,
    noise,
    problem,
    set_nodes,
    share,
)
from tests.ranks import rank_mesh, run_on_ranks

LOSSES = {
    "ce": lambda k: CrossEntropy(sample_rate=0.3, label_smoothing=0.1),
    "decoupled_softmax": lambda k: DecoupledSoftmax(sample_rate=0.3),
    "nce": lambda k: NoiseContrastiveEstimation(t=7, samples=20).prepare(facts(k)),
}


def sampled_head(kind: str, weighting: str, num_classes: int, mesh=None, seed: int = 3):
    tree = label_tree(weighting, num_classes)
    head = ClassHead(5, tree, LOSSES[kind](num_classes), mesh=mesh, seed=seed, dtype=torch.float64)
    features, labels, nodes = problem(tree, num_rows=6, dim=5)
    set_nodes(head, nodes)
    return head, features, labels, nodes


def drawn(head: ClassHead, labels: torch.Tensor, draw: int) -> torch.Tensor:
    """The weight of each class [K], 0 if it was not drawn."""
    held = head.engine.weights.held
    choice = head.loss.choose(held, labels, draw)
    weights = torch.zeros(head.num_classes, dtype=torch.float64)
    weights[held.class_ids[choice.positions]] = choice.weights
    return weights


def definition(kind: str, z: torch.Tensor, labels: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The losses with every sum over classes weighted by `w` [K]."""
    true = z[torch.arange(len(z)), labels]
    if kind == "decoupled_softmax":  # the labels of the batch have the weight 1
        return ((w * z.exp()).sum(1).log() - true).mean()
    if kind == "ce":
        log_partition = (w * z.exp()).sum(1).log()
        return (log_partition - 0.9 * true - 0.1 * (w * z).sum(1) / z.shape[1]).mean()
    q = noise(z.shape[1])
    g = 1 / (1 + 7 * q * torch.exp(-z))
    own = g[torch.arange(len(z)), labels]
    return (-own.log() - 7 * (w * q * (1 - g).log()).sum(1)).mean()


@pytest.mark.parametrize("memory", [1, 1 << 20], ids=["blocks", "one block"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_sampled_step_equals_its_definition(kind, weighting, memory):
    head, features, labels, nodes = sampled_head(kind, weighting, 150)
    object.__setattr__(head.engine, "memory_bytes", memory)
    weights = drawn(head, labels, (3 << 32) + 0)
    assert 0 < (weights == 0).sum() < 150
    x, v = features.clone().requires_grad_(), nodes.clone().requires_grad_()
    expected = definition(kind, naive_logits(head.tree, x, v), labels, weights)
    expected.backward()
    wanted = float(expected.detach()), x.grad.numpy(), v.grad.numpy()
    for got, want in zip(loss_and_gradients(head, features, labels), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


SHARDED = [(kind, weighting) for kind in LOSSES for weighting in ("dense", "vtree")]


def sharded(data_axis: int):
    mine, found = share(6), {}
    for case in SHARDED:
        head, features, labels, _ = sampled_head(*case, 40, rank_mesh(data_axis))
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        found[case] = *loss_and_gradients(head, features[mine], labels[mine]), mine, held
    return found


@pytest.mark.parametrize(("world_size", "data_axis"), [(4, 2)])
def test_every_world_size_draws_the_same_classes(world_size, data_axis):
    ranks = run_on_ranks(world_size, sharded, data_axis)
    for case in SHARDED:
        head, features, labels, _ = sampled_head(*case, 40)
        loss, by_features, by_nodes = loss_and_gradients(head, features, labels)
        for found in ranks:
            got_loss, got_features, got_nodes, mine, held = found[case]
            np.testing.assert_allclose(got_loss, loss, rtol=1e-10)
            np.testing.assert_allclose(got_features, by_features[mine], atol=1e-10)
            np.testing.assert_allclose(got_nodes, by_nodes[held], atol=1e-10)


@pytest.mark.parametrize("kind", LOSSES)
def test_each_step_draws_different_classes_and_a_resumed_run_draws_the_same_ones(kind):
    head, features, labels, _ = sampled_head(kind, "dense", 150)
    first, second, third = (head(features, labels).item() for _ in range(3))
    assert len({first, second, third}) == 3
    resumed, *_ = sampled_head(kind, "dense", 150)
    resumed.draw = 1
    assert resumed(features, labels).item() == second
    other, *_ = sampled_head(kind, "dense", 150, seed=4)
    assert other(features, labels).item() != first


@pytest.mark.parametrize("kind", LOSSES)
def test_evaluation_uses_all_classes(kind):
    head, features, labels, nodes = sampled_head(kind, "dense", 150)
    z = naive_logits(head.tree, features, nodes)
    exact = definition(kind, z, labels, torch.ones(150, dtype=torch.float64))
    with torch.no_grad():
        torch.testing.assert_close(head(features, labels), exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(head.eval()(features, labels).detach(), exact)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_expected_weight_of_every_class_is_one(kind):
    head, _, labels, _ = sampled_head(kind, "dense", 40)
    draws = torch.stack([drawn(head, labels, draw) for draw in range(1000)])
    error = draws.std(0) / 1000**0.5
    # Within five standard errors for 40 classes. Except with nce, classes that have a row
    # have weight 1.
    assert ((draws.mean(0) - 1).abs() <= 5 * error + 1e-12).all()
    if kind != "nce":
        assert (draws[:, labels] == 1).all()


def test_hashed_numbers_are_uniform_and_independent_between_draws():
    numbers = torch.arange(100_000)
    first, second = uniform(1, numbers), uniform(2, numbers)
    assert ((first >= 0) & (first < 1)).all()
    counts = torch.histc(first.float(), 50, 0, 1)
    assert ((counts - 2000).abs() < 5 * 2000**0.5).all()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 5 / 100_000**0.5
    assert abs(torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1]) < 5 / 100_000**0.5
