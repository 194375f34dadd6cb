"""Weights of rows and classes work with every loss and every head."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, FactoredHead
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.losses import LOSSES
from tests.heads.cases import (
    LOSS_KINDS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_logits,
    naive_loss_and_gradients,
    problem,
    set_nodes,
)

CLASSES, DIM, ROWS = 13, 5, 7
EXACT = {"rtol": 1e-10, "atol": 1e-10}
WEIGHTS = torch.tensor([0.2, 1.0, 0.0, 3.0, 0.5, 1.5, 0.7], dtype=torch.float64)
OF_CLASSES = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
ROW_BY_ROW = [kind for kind in LOSS_KINDS if not LOSSES[kind].couples_rows]


def make_head(kind: str, mesh: Any = None, **options: Any) -> ClassHead:
    options = {"init_std": 0.4, "dtype": torch.float64} | options
    return ClassHead(
        DIM, label_tree("vtree", CLASSES), make_loss(kind, CLASSES), mesh=mesh, **options
    )


def batch() -> tuple[Tensor, Tensor]:
    features, labels, _ = problem(label_tree("vtree", CLASSES), num_rows=ROWS, dim=DIM)
    return features, labels


@pytest.mark.parametrize("kind", ROW_BY_ROW)
def test_row_weights_give_a_weighted_mean_of_the_rows(kind: str) -> None:
    """As in torch.nn.functional.cross_entropy, the divisor is the sum of the weights. The weight of
    a row is multiplied by that of its class."""
    head = make_head(kind, class_weights=OF_CLASSES)
    features, labels, _ = problem(head.tree, num_rows=ROWS, dim=DIM)
    nodes = torch.cat([head.weight.detach(), head.bias.detach()[:, None]], dim=1)
    leaf = features.clone().requires_grad_()
    value = head(leaf, labels, WEIGHTS)
    value.backward()
    weights = WEIGHTS * OF_CLASSES[labels]
    shares = (weights / weights.sum()).tolist()
    alone = [
        naive_loss_and_gradients(kind, head.tree, features[i : i + 1], labels[i : i + 1], nodes)
        for i in range(ROWS)
    ]
    want = sum(share * loss for share, (loss, _, _) in zip(shares, alone, strict=True))
    np.testing.assert_allclose(value.item(), want, **EXACT)
    for row, (share, (_, by_features, _)) in enumerate(zip(shares, alone, strict=True)):
        np.testing.assert_allclose(leaf.grad[row], share * by_features[0], **EXACT)
    by_nodes = sum(share * grad for share, (_, _, grad) in zip(shares, alone, strict=True))
    np.testing.assert_allclose(gradient_of_nodes(head), by_nodes, **EXACT)


def test_batch_cross_entropy_with_weights_is_the_divergence_from_the_weighted_target() -> None:
    head = make_head("batch_ce", class_weights=torch.arange(13.0, dtype=torch.float64))
    features, _, nodes = problem(head.tree, num_rows=4, dim=DIM)
    set_nodes(head, nodes)
    labels = torch.tensor([1, 2, 3, 2])
    p = torch.tensor([1, 2, 3, 2], dtype=torch.float64) / 8
    q = naive_logits(head.tree, features, nodes).flatten().softmax(0).view(4, CLASSES)
    want = (p * (p / q[torch.arange(4), labels]).log()).sum()
    torch.testing.assert_close(head(features, labels).detach(), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_rows_of_a_class_with_weight_zero_get_a_zero_gradient_and_no_nan(kind: str) -> None:
    weights = torch.ones(CLASSES, dtype=torch.float64)
    weights[0] = 0
    head = make_head(kind, class_weights=weights)
    features, _, _ = problem(head.tree, num_rows=4, dim=DIM)
    features.requires_grad_()
    head(features, torch.tensor([0, 3, 0, 5])).backward()
    assert gradient_of_nodes(head).isfinite().all()
    if kind in ROW_BY_ROW:  # the others compare rows with each other
        assert (features.grad[[0, 2]] == 0).all()


def test_the_factored_head_weights_rows_like_the_dense_head() -> None:
    options = {"dtype": torch.float64, "init_std": 0.4, "class_weights": OF_CLASSES}
    ours = FactoredHead(DIM, CLASSES, make_loss("spherical_softmax", CLASSES), **options)
    loss = make_loss("spherical_softmax", CLASSES)
    plain = ClassHead(DIM, CLASSES, loss, bias=False, **options)
    features, labels = batch()
    found = []
    for head in (ours, plain):
        leaf = features.clone().requires_grad_()
        value = head(leaf, labels, WEIGHTS)
        value.backward()
        found.append((value.detach(), leaf.grad))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(mine, theirs, **EXACT)
    norm = plain.weight.grad.square().sum()
    np.testing.assert_allclose(ours.squared_gradient_norm(), norm, **EXACT)


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
        torch.full((ROWS,), -1.0),
        torch.full((ROWS,), torch.nan),
        torch.ones(ROWS, dtype=torch.int64),
        torch.full((ROWS,), 1e16),  # sums and products could overflow
    ],
)
def test_invalid_row_weights_are_rejected(weights: Tensor) -> None:
    head = make_head("ce")
    features, labels, _ = problem(head.tree, num_rows=ROWS, dim=DIM)
    with pytest.raises(ValueError, match="any row weights as a float"):
        head(features, labels, weights)


@pytest.mark.parametrize(
    "weights", [[1.0] * 3, [1.0, -1, 1, 1], [0.0] * 4, [1.0, 1, 1, torch.inf], [1e-60] * 4]
)
def test_invalid_class_weights_are_rejected(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="class_weights of shape"):
        ClassHead(3, 4, make_loss("ce", 4), class_weights=torch.tensor(weights).double())


def test_a_batch_without_a_row_of_positive_weight_is_rejected() -> None:
    features, labels = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    loss = make_loss("ce", 4)
    of_classes = ClassHead(3, 4, loss, class_weights=torch.tensor([0.0, 1, 1, 1]))
    for head, weights in (
        (of_classes, None),
        (ClassHead(3, 4, loss), torch.zeros(2)),
    ):
        with pytest.raises(ValueError, match="no rows with a positive weight"):
            head(features, labels, weights)
