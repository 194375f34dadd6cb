"""Row weights, which mixed labels require, work with every loss and every head."""

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, FactoredHead
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.losses import LOSSES
from tests.heads.cases import (
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_loss_and_gradients,
    problem,
)
from tests.ranks import rank_world, run_on_ranks

CLASSES, DIM, ROWS = 13, 5, 7
EXACT = {"rtol": 1e-10, "atol": 1e-10}
WEIGHTS = torch.tensor([0.2, 1.0, 0.0, 3.0, 0.5, 1.5, 0.7], dtype=torch.float64)
# hierarchical_softmax has a separate head.
ROW_BY_ROW = [
    kind
    for kind, loss in LOSSES.items()
    if not loss.couples_rows and kind != "hierarchical_softmax"
]


def make_head(kind: str, mesh=None) -> tuple[ClassHead, Tensor, Tensor]:
    tree = label_tree("vtree", CLASSES)
    loss = make_loss(kind, CLASSES)
    head = ClassHead(DIM, tree, loss, mesh=mesh, dtype=torch.float64, init_std=0.4)
    features, labels, _ = problem(tree, num_rows=ROWS, dim=DIM)
    return head, features, labels


@pytest.mark.parametrize("kind", ROW_BY_ROW)
def test_row_weights_give_a_weighted_mean_of_the_rows(kind: str) -> None:
    head, features, labels = make_head(kind)
    nodes = torch.cat([head.weight.detach(), head.bias.detach()[:, None]], dim=1)
    features.requires_grad_()
    value = head(features, labels, WEIGHTS)
    value.backward()
    shares = (WEIGHTS / WEIGHTS.sum()).tolist()
    alone = [
        naive_loss_and_gradients(
            kind, head.tree, features.detach()[i : i + 1], labels[i : i + 1], nodes
        )
        for i in range(ROWS)
    ]
    want = sum(share * loss for share, (loss, _, _) in zip(shares, alone, strict=True))
    np.testing.assert_allclose(value.item(), want, **EXACT)
    for row, (share, (_, by_features, _)) in enumerate(zip(shares, alone, strict=True)):
        np.testing.assert_allclose(features.grad[row], share * by_features[0], **EXACT)
    by_nodes = sum(share * grad for share, (_, _, grad) in zip(shares, alone, strict=True))
    np.testing.assert_allclose(gradient_of_nodes(head), by_nodes, **EXACT)


SHARDED = ("ce", "batch_ce", "bce")


def values_and_gradients() -> dict[str, list[np.ndarray]]:
    return {kind: value_and_gradients(kind) for kind in SHARDED}


def value_and_gradients(kind: str) -> list[np.ndarray]:
    world = rank_world()
    rank, world_size = world.rank, world.size
    head, features, labels = make_head(kind, world.mesh)
    # Uneven; with three ranks, rank 1 has no rows.
    cuts = {1: [0, ROWS], 2: [0, 2, ROWS], 3: [0, 3, 3, ROWS]}[world_size]
    mine = slice(cuts[rank], cuts[rank + 1])
    part = features[mine].requires_grad_()
    value = head(part, labels[mine], WEIGHTS[mine])
    value.backward()
    return [value.detach().numpy(), part.grad.numpy(), gradient_of_nodes(head).numpy()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_weighted_rows_give_the_same_results_on_uneven_ranks(world_size: int) -> None:
    ranks = run_on_ranks(world_size, values_and_gradients)
    for kind in SHARDED:
        value, by_features, by_nodes = value_and_gradients(kind)
        parts = [found[kind] for found in ranks]
        for got, *_ in parts:
            np.testing.assert_allclose(got, value, **EXACT, err_msg=kind)
        for index, expected in ((1, by_features), (2, by_nodes)):
            got = np.concatenate([part[index] for part in parts])
            np.testing.assert_allclose(got, expected, **EXACT, err_msg=kind)


@pytest.mark.parametrize("kind", ["quadratic", "spherical_softmax"])
def test_the_factored_head_weights_rows_like_the_dense_head(kind: str) -> None:
    options = {"dtype": torch.float64, "init_std": 0.4}
    ours = FactoredHead(DIM, CLASSES, make_loss(kind, CLASSES), **options)
    plain = ClassHead(DIM, CLASSES, make_loss(kind, CLASSES), bias=False, **options)
    features, labels, _ = problem(plain.tree, num_rows=ROWS, dim=DIM)
    found = []
    for head in (ours, plain):
        leaf = features.clone().requires_grad_()
        value = head(leaf, labels, WEIGHTS)
        value.backward()
        found.append((value.detach(), leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, **EXACT)
    np.testing.assert_allclose(
        ours.squared_gradient_norm(), plain.weight.grad.square().sum(), **EXACT
    )


def test_hierarchical_softmax_weights_rows() -> None:
    head = HierarchicalSoftmaxHead(DIM, label_tree("vtree", CLASSES), dtype=torch.float64)
    features, labels, _ = problem(head.label_tree, num_rows=ROWS, dim=DIM)
    alone = torch.stack([head(features[i : i + 1], labels[i : i + 1]) for i in range(ROWS)])
    want = (WEIGHTS * alone).sum() / WEIGHTS.sum()
    torch.testing.assert_close(head(features, labels, WEIGHTS), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "weights",
    [
        torch.ones(ROWS - 1),
        torch.ones(ROWS, 1),
        torch.full((ROWS,), -1.0),
        torch.full((ROWS,), torch.nan),
        torch.ones(ROWS, dtype=torch.int64),
        torch.full((ROWS,), 1e308, dtype=torch.float64),  # their sum is infinite
    ],
)
def test_invalid_row_weights_are_rejected(weights: Tensor) -> None:
    head, features, labels = make_head("ce")
    with pytest.raises(ValueError, match="any row weights as a float"):
        head(features, labels, weights)


def test_row_weights_that_are_all_zero_are_rejected() -> None:
    head, features, labels = make_head("ce")
    with pytest.raises(ValueError, match="no rows with a positive weight"):
        head(features, labels, torch.zeros(ROWS))
    small = ClassHead(DIM, CLASSES, make_loss("ce", CLASSES))
    with pytest.raises(ValueError, match="no rows with a positive weight"):
        # The head computes in float32, in which these weights are zero.
        small(features.float(), labels, torch.full((ROWS,), 1e-50, dtype=torch.float64))


def weights_on_one_rank() -> str:
    world = rank_world()
    head, features, labels = make_head("ce", world.mesh)
    try:
        head(features, labels, WEIGHTS if world.rank else None)
    except ValueError as error:
        return str(error)
    return "no error"


def test_row_weights_on_only_some_ranks_raise_an_error_on_all_ranks() -> None:
    for answer in run_on_ranks(2, weights_on_one_rank):
        assert "use of row weights" in answer
