"""Ignored rows have no effect on the loss, on its gradients or on the host."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead
from heads.losses import SphericalSoftmax
from tests.heads.cases import LOSS_KINDS, gradient_of_nodes, label_tree, make_loss, problem
from tests.host_reads import host_reads
from tests.ranks import rank_world, run_on_ranks

CLASSES, DIM, IGNORED = 13, 5, 3
EXACT = {"rtol": 1e-10, "atol": 1e-12}
# The first row is ignored, and so are all rows of the first of two ranks.
COUNTS = torch.tensor([False, False, True, True, False, True, True])
WEIGHTS = torch.tensor([0.2, 1.0, 0.0, 3.0, 0.5, 1.5, 0.7], dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "class weights": {"class_weights": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)},
}


def make_head(kind: str, mesh: Any = None, **options: Any) -> ClassHead:
    loss = make_loss(kind, CLASSES)
    options = {"init_std": 0.4, "dtype": torch.float64, "ignore_index": IGNORED} | options
    return ClassHead(DIM, label_tree("vtree", CLASSES), loss, mesh=mesh, **options)


def batch() -> tuple[Tensor, Tensor]:
    """Return features [7, d] and labels [7]. The features of ignored rows are NaN."""
    features, labels, _ = problem(label_tree("vtree", CLASSES), num_rows=len(COUNTS), dim=DIM)
    labels = labels.where(labels != IGNORED, 0).where(COUNTS, IGNORED)
    return features.where(COUNTS[:, None], torch.nan), labels


def results(
    head: ClassHead, rows: Any, row_weights: Tensor | None, *, deferred: bool
) -> list[Tensor]:
    """Return the loss of some rows of the batch, and the gradients of features and nodes."""
    features, labels = (each[rows] for each in batch())
    features = features.to(head.weight.dtype).requires_grad_()
    weights = None if row_weights is None else row_weights[rows]
    loss = head(features, labels, weights, rows_of_ranks=[len(labels)] if deferred else None)
    head.zero_grad()
    loss.backward()
    return [loss.detach(), features.grad, gradient_of_nodes(head)]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_ignored_rows_have_no_effect(kind: str, options: str, deferred: bool) -> None:
    head = make_head(kind, **OPTIONS[options])
    for row_weights in (None, WEIGHTS):
        expected = results(head, COUNTS, row_weights, deferred=deferred)
        found = results(head, slice(None), row_weights, deferred=deferred)
        assert (found[1][~COUNTS] == 0).all()
        found[1] = found[1][COUNTS]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("deferred", [False, True])
def test_an_ignored_row_whose_loss_would_be_infinite_has_no_effect(deferred: bool) -> None:
    head = make_head("spherical_softmax").float()
    # In float32, eps is 0, so the loss of a row whose logits are 0 contains log 0.
    object.__setattr__(head.engine, "loss", SphericalSoftmax(eps=1e-50))
    with torch.no_grad():
        assert head.bias is not None
        head.bias.zero_()
    found = results(head, slice(None), None, deferred=deferred)
    assert all(each.isfinite().all() for each in found)


def test_a_batch_loss_needs_two_rows_that_are_not_ignored() -> None:
    features, labels = batch()
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        make_head("batch_ce")(features[1:3], labels[1:3])


def reads() -> list[str]:
    found = []
    for kind, options in product(LOSS_KINDS, OPTIONS.values()):
        head = make_head(kind, **options)
        features, labels = batch()
        features.requires_grad_()
        with host_reads() as lines:
            head(features, labels, WEIGHTS, rows_of_ranks=[len(labels)]).backward()
        found += [f"{kind}: {line}" for line in lines]
    return found


def test_the_host_does_not_wait_for_the_number_of_ignored_rows() -> None:
    assert reads() == []


def sharded(class_ranks: int) -> dict[str, list[np.ndarray]]:
    """Return each loss and the gradient of this rank's features: two rows of the batch on the first
    rank, and five on the second."""
    world = rank_world(class_ranks)
    start, stop = ((0, 2), (2, 7))[world.rank]
    found = {}
    for kind in LOSS_KINDS:
        head = make_head(kind, world.mesh)
        features, labels = (each[start:stop] for each in batch())
        features.requires_grad_()
        loss = head(features, labels, rows_of_ranks=[2, 5])
        loss.backward()
        found[kind] = [loss.detach().numpy(), features.grad.numpy()]
    return found


@pytest.mark.parametrize("class_ranks", [1, 2])
def test_a_rank_whose_rows_are_all_ignored_does_not_change_the_results(class_ranks: int) -> None:
    ranks = run_on_ranks(2, sharded, class_ranks)
    for kind in LOSS_KINDS:
        loss, by_features, _ = results(make_head(kind), slice(None), None, deferred=True)
        for found, part in zip(ranks, (slice(0, 2), slice(2, 7)), strict=True):
            np.testing.assert_allclose(found[kind][0], loss, **EXACT, err_msg=kind)
            np.testing.assert_allclose(found[kind][1], by_features[part], **EXACT, err_msg=kind)
