"""A gradient is computed only if some rank requires it."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heads import ClassHead, Dot, FactoredHead, FusedSGD, HierarchicalSoftmaxHead
from heads.losses import CrossEntropy, SphericalSoftmax
from tests.heads.cases import WEIGHTINGS, gradient_of_nodes, label_tree, problem
from tests.ranks import rank_mesh, run_on_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ROWS, DIM, CLASSES = 6, 5, 150
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}
HEADS = (*WEIGHTINGS, "hierarchical softmax", "factored", "sampled")


def make_head(name: str, mesh=None, num_classes: int = CLASSES) -> ClassHead:
    options = {"mesh": mesh, "init_std": 0.3, "dtype": torch.float64}
    match name:
        case "hierarchical softmax":
            return HierarchicalSoftmaxHead(DIM, label_tree("vtree", num_classes), **options)
        case "factored":
            return FactoredHead(DIM, num_classes, SphericalSoftmax(), **options)
        case "sampled":
            return ClassHead(DIM, num_classes, CrossEntropy(sample_rate=0.3), **options)
    return ClassHead(DIM, label_tree(name, num_classes), CrossEntropy(), **options)


def batch(num_classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    features, labels, _ = problem(label_tree("dense", num_classes), num_rows=ROWS, dim=DIM)
    return features, labels


def gradients(head: ClassHead, features: Tensor, labels: Tensor, *, of_features: bool):
    """The gradients of the features and of the weight, None if there is none. For a factored head,
    the second is the norm of the gradient."""
    features = features.clone().requires_grad_(of_features)
    head(features, labels).backward()
    if isinstance(head, FactoredHead):
        norm = head.squared_gradient_norm().numpy()
        return None if features.grad is None else features.grad.numpy(), norm
    grads = features.grad, None if head.weight.grad is None else gradient_of_nodes(head)
    return tuple(None if grad is None else grad.numpy().copy() for grad in grads)


class Recorder(TorchDispatchMode):
    """Counts matrix products and records the size of the largest tensor created."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.num_products += function.overloadpacket in PRODUCTS
        if isinstance(result, Tensor) and not function.is_view:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(
    ("of_features", "of_weight", "num_products"),
    [(True, True, 3), (False, True, 2), (True, False, 2)],
)
def test_frozen_features_or_weights_save_one_matrix_product(of_features, of_weight, num_products):
    features, labels = batch()
    head = make_head("dense").requires_grad_(of_weight)
    with Recorder() as recorder:
        head(features.requires_grad_(of_features), labels).backward()
    assert recorder.num_products == num_products


LEARNED = ("weight", "bias", "log_scale", "offset")


def head_that_learns(names, mesh=None, **options) -> ClassHead:
    """A head with every kind of parameter, of which only `names` require a gradient."""
    logits = Dot(scale=1.5, learn_scale=True, learn_offset=True)
    head = ClassHead(
        DIM, CLASSES, CrossEntropy(), logits=logits, mesh=mesh, init_std=0.3, **options
    )
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name in names)
    return head


@pytest.mark.parametrize("fuses", [False, True], ids=["SGD", "FusedSGD"])
@pytest.mark.parametrize("name", LEARNED[1:])
def test_a_frozen_weight_costs_nothing_if_another_parameter_is_learned(name, fuses):
    features, labels = batch()
    head = head_that_learns([name], dtype=torch.float64)
    if fuses:
        FusedSGD(head, lr=1.0)
    object.__setattr__(head.engine, "memory_bytes", 1)  # blocks of 64 classes
    with Recorder() as recorder:
        head(features, labels).backward()
    assert recorder.largest < head.weight.numel()
    # The logits of three blocks, twice; the gradient of the scale needs that of the features.
    assert recorder.num_products == 3 * (2 + (name == "log_scale"))
    assert [each for each, p in head.named_parameters() if p.grad is not None] == [name]


def gradients_of_what_is_learned(names_of_ranks, data_axis):
    """The gradients on this rank, and the classes that it holds."""
    mesh, rank, rows = None, 0, slice(None)
    if data_axis is not None:
        mesh, rank = rank_mesh(data_axis), torch.distributed.get_rank()
        rows = slice(3 * rank, 3 * rank + 3)
    features, labels = batch()
    head = head_that_learns(names_of_ranks[rank], mesh, dtype=torch.float64)
    head(features[rows], labels[rows]).backward()
    grads = {name: p.grad.numpy() for name, p in head.named_parameters() if p.grad is not None}
    return grads, slice(head.engine.weights.start, head.engine.weights.stop)


@pytest.mark.parametrize(
    ("data_axis", "learned"),
    [(1, (["weight"], ["bias", "offset"])), (1, (["log_scale"], [])), (2, (LEARNED, ["offset"]))],
)
def test_each_rank_gets_the_gradients_of_the_parameters_that_it_learns(learned, data_axis):
    expected, _ = gradients_of_what_is_learned([LEARNED], None)
    ranks = run_on_ranks(2, gradients_of_what_is_learned, learned, data_axis)
    for names, (grads, held) in zip(learned, ranks, strict=True):
        assert grads.keys() == set(names)
        for name, grad in grads.items():
            part = held if grad.ndim else ...
            np.testing.assert_allclose(grad, expected[name][part], **EXACT)


# What requires a gradient: the features and weight of rank 0, the features and weight of rank 1.
REQUIRED = [case for case in product((True, False), repeat=4) if any(case)]


def on_two_ranks(data_axis: int, num_classes: int, first_rows: int):
    """The gradients of each head in each case on this rank, or the error message."""
    mesh, rank = rank_mesh(data_axis), torch.distributed.get_rank()
    features, labels = batch(num_classes)
    mine = slice(0, first_rows) if rank == 0 else slice(first_rows, ROWS)
    found = {}
    for name, case in product(HEADS, REQUIRED):
        of_features, of_weight = case[2 * rank : 2 * rank + 2]
        head = make_head(name, mesh, num_classes).requires_grad_(of_weight)
        try:
            result = gradients(head, features[mine], labels[mine], of_features=of_features)
        except ValueError as error:
            result = str(error)
        held = slice(head.engine.weights.start, head.engine.weights.stop)
        found[name, case] = result, (mine, held)
    return found


@pytest.mark.parametrize(
    ("data_axis", "num_classes", "first_rows"),
    [
        (2, CLASSES, 3),
        (1, 1, 3),  # rank 1 has no classes
        (1, CLASSES, 0),  # rank 0 has no rows
    ],
)
def test_each_rank_gets_the_gradients_that_it_requires(data_axis, num_classes, first_rows):
    features, labels = batch(num_classes)
    expected = {
        name: gradients(make_head(name, None, num_classes), features, labels, of_features=True)
        for name in HEADS
    }
    ranks = run_on_ranks(2, on_two_ranks, data_axis, num_classes, first_rows)
    for (name, case), rank in product(ranks[0], (0, 1)):
        result, (rows, nodes) = ranks[rank][name, case]
        of_features, of_weight = case[2 * rank : 2 * rank + 2]
        if name == "factored":
            if case[1] != case[3]:
                assert "requires a gradient on only some ranks" in result
                continue
            nodes = ...
            of_weight = True  # its norm
            expected_by_weight = expected[name][1] if case[1] else np.zeros(())
        else:
            expected_by_weight = expected[name][1]
        by_features, by_weight = result
        assert (by_features is not None) == of_features, (name, case)
        assert (by_weight is not None) == of_weight, (name, case)
        if of_features:
            np.testing.assert_allclose(by_features, expected[name][0][rows], **EXACT)
        if of_weight:
            np.testing.assert_allclose(by_weight, expected_by_weight[nodes], **EXACT)


def accumulated_on_a_partly_frozen_head():
    rank = torch.distributed.get_rank()
    head = make_head("dense", rank_mesh(2)).requires_grad_(rank == 0)
    head.accumulates = True
    try:
        head(*batch())
    except ValueError as error:
        return str(error)


def test_accumulating_a_gradient_that_only_one_replica_requires_raises_an_error():
    for message in run_on_ranks(2, accumulated_on_a_partly_frozen_head):
        assert "requires a gradient on only some ranks" in message
