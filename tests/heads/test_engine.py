"""With every weighting, every loss and its gradients match their definitions.

test_sharded.py tests them on several ranks.
"""

from itertools import product

import numpy as np
import pytest
import torch

from heads import ClassHead, FactoredHead, HierarchicalSoftmaxHead
from heads.losses import LOSSES, SphericalSoftmax
from tests.heads.cases import (
    LOSS_KINDS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    loss_and_gradients,
    make_loss,
    naive_loss_and_gradients,
    problem,
    set_nodes,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def make_head(kind: str, weighting: str, num_classes: int, dim: int, mesh=None) -> ClassHead:
    tree = label_tree(weighting, num_classes)
    return ClassHead(dim, tree, make_loss(kind, num_classes), mesh=mesh, dtype=torch.float64)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_loss_and_gradients_equal_the_definition(kind):
    for weighting in WEIGHTINGS:
        head = make_head(kind, weighting, num_classes=70, dim=7)
        features, labels, nodes = problem(head.tree, num_rows=9, dim=7)
        set_nodes(head, nodes)
        expected = naive_loss_and_gradients(kind, head.tree, features, labels, nodes)
        for memory_bytes in (None, 1):  # one block that is saved, or blocks that are recomputed
            object.__setattr__(head.engine, "memory_bytes", memory_bytes)
            head.zero_grad()
            found = loss_and_gradients(head, features, labels)
            for got, want in zip(found, expected, strict=True):
                np.testing.assert_allclose(got, want, **EXACT, err_msg=weighting)


def heads_of_each_kind(num_classes: int) -> list[ClassHead]:
    weights = torch.linspace(1, 2, num_classes)
    return [
        ClassHead(3, num_classes, LOSSES["ce"](), class_weights=weights),
        HierarchicalSoftmaxHead(3, label_tree("vtree", num_classes)),
        FactoredHead(3, num_classes, SphericalSoftmax()),
    ]


INTEGERS = [getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


def test_labels_of_any_integer_dtype_are_class_ids():
    features, labels = torch.randn(4, 3), torch.tensor([1, 0, 4, 2])
    # More classes than 8 bits can represent.
    for head, dtype in product(heads_of_each_kind(300), INTEGERS):
        head.eval()
        given = labels.to(dtype)
        torch.testing.assert_close(head(features, given), head(features, labels))
        torch.testing.assert_close(head.row_weights(given), head.row_weights(labels))


def test_a_label_above_int64_is_outside_the_classes():
    labels = torch.tensor([0, 2**64 - 100], dtype=torch.uint64)
    for head in heads_of_each_kind(5):
        with pytest.raises(ValueError, match="1 in the global batch"):
            head(torch.zeros(2, 3), labels)


def test_a_second_derivative_is_rejected_and_inference_mode_is_supported():
    head = make_head("ce", "dense", 5, 3)
    features, labels, _ = problem(head.tree, num_rows=4, dim=3)
    loss = head(features.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, features, create_graph=True)
    with torch.inference_mode():
        torch.testing.assert_close(head(features, labels), loss.detach())


BATCH_LOSSES = [kind for kind, loss in LOSSES.items() if loss.couples_rows]


@pytest.mark.parametrize("kind", BATCH_LOSSES)
def test_a_batch_loss_of_a_single_row_is_defined_only_in_evaluation(kind):
    head = make_head(kind, "dense", 4, 3)
    features, labels, nodes = problem(head.tree, num_rows=1, dim=3)
    set_nodes(head, nodes)
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        head(features, labels)
    expected = naive_loss_and_gradients(kind, head.tree, features, labels, nodes)
    with torch.no_grad():
        np.testing.assert_allclose(head(features, labels), expected[0], **EXACT)
    for got, want in zip(loss_and_gradients(head.eval(), features, labels), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("memory_bytes", [None, 1], ids=["saved", "recomputed"])
def test_scaling_a_loss_scales_its_gradients_and_gradients_of_two_calls_add_up(memory_bytes):
    head = make_head("batch_ce", "vtree", 70, 5)
    object.__setattr__(head.engine, "memory_bytes", memory_bytes)
    features, labels, nodes = problem(head.tree, num_rows=6, dim=5)
    set_nodes(head, nodes)
    _, _, once = loss_and_gradients(head, features, labels)
    once = once.copy()
    head.zero_grad()
    (head(features, labels) * 3 + head(features, labels)).backward()
    np.testing.assert_allclose(gradient_of_nodes(head).numpy(), 4 * once, **EXACT)


def test_a_weight_changed_between_forward_and_backward_raises_an_error():
    head = make_head("ce", "dense", 13, 5)
    features, labels, _ = problem(head.tree, num_rows=6, dim=5)
    loss = head(features, labels)
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Losses that use sums of z or z^2 have no finite value at z = -inf.
AT_MINUS_INFINITY = (
    "batch_ce",
    "max_margin",
    "batch_max_margin",
    "self_norm",
    "nce",
    "bce",
    "softmax_cs",
    "sigmoid_cs",
    "softmax_tanimoto",
    "sigmoid_tanimoto",
    "topk_hinge",
    "smooth_topk",
    "simloss",
)


@pytest.mark.parametrize("kind", AT_MINUS_INFINITY)
def test_an_impossible_class_gets_a_zero_gradient_and_no_nan(kind):
    head = ClassHead(2, 200, make_loss(kind, 200), bias=True, dtype=torch.float64)
    object.__setattr__(head.engine, "memory_bytes", 1)  # blocks of 64: the last is all -inf
    with torch.no_grad():
        head.bias[128:] = -torch.inf
    features = torch.randn(3, 2, dtype=torch.float64).abs().requires_grad_()
    value = head(features, torch.tensor([0, 1, 2]))
    assert torch.isfinite(value)
    value.backward()
    gradient = gradient_of_nodes(head)
    assert (gradient[128:] == 0).all()
    assert torch.isfinite(gradient).all()
