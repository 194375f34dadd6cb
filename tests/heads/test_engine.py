"""With every weighting, every loss and its gradients match their definitions, including when
sharded."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, FactoredHead, HierarchicalSoftmaxHead
from heads.losses import LOSSES, SphericalSoftmax
from heads.weights import shard_range
from tests.heads.cases import (
    LOSS_KINDS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_logits,
    naive_loss_and_gradients,
    problem,
    set_nodes,
)
from tests.ranks import rank_mesh, run_on_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def make_head(kind: str, weighting: str, num_classes: int, dim: int, mesh=None) -> ClassHead:
    tree = label_tree(weighting, num_classes)
    return ClassHead(dim, tree, make_loss(kind, num_classes), mesh=mesh, dtype=torch.float64)


def loss_and_gradients(head: ClassHead, features: Tensor, labels: Tensor):
    features = features.clone().requires_grad_()
    loss = head(features, labels)
    loss.backward()
    return float(loss.detach()), features.grad.numpy(), gradient_of_nodes(head).numpy()


@pytest.mark.parametrize("memory", ["one block, saved", "blocks of 64 nodes, recomputed"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_loss_and_gradients_equal_the_definition(kind, weighting, memory):
    head = make_head(kind, weighting, num_classes=70, dim=7)
    if memory != "one block, saved":
        object.__setattr__(head.engine, "memory_bytes", 1)
    features, labels, nodes = problem(head.tree, num_rows=9, dim=7)
    set_nodes(head, nodes)
    expected = naive_loss_and_gradients(kind, head.tree, features, labels, nodes)
    for got, want in zip(loss_and_gradients(head, features, labels), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


def sharded_case(kind: str, weighting: str, num_classes: int, data_axis: int, blocks: bool):
    """This rank's loss and gradients, and the ranges of rows and nodes to which they belong."""
    head = make_head(kind, weighting, num_classes, 5, rank_mesh(data_axis))
    if blocks:
        object.__setattr__(head.engine, "memory_bytes", 1)
    # 11 rows, which do not divide evenly among the ranks.
    features, labels, nodes = problem(head.tree, num_rows=11, dim=5)
    set_nodes(head, nodes)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    begin, end = 11 * rank // world, 11 * (rank + 1) // world
    results = loss_and_gradients(head, features[begin:end], labels[begin:end])
    return results, (begin, end), (head.engine.weights.start, head.engine.weights.stop)


def all_sharded_cases(num_classes: int, data_axis: int, blocks: bool):
    return {
        (kind, weighting): sharded_case(kind, weighting, num_classes, data_axis, blocks)
        for kind in LOSS_KINDS
        for weighting in WEIGHTINGS
        if kind not in ("topk_hinge", "smooth_topk") or num_classes > 1
    }


@pytest.mark.parametrize(
    ("world_size", "num_classes", "data_axis"),
    [
        pytest.param(2, 13, 1, marks=pytest.mark.slow),
        (3, 13, 1),
        (4, 13, 1),
        (4, 5, 1),  # chunks of 2: the last rank of the dense head has no classes
        pytest.param(4, 2, 1, marks=pytest.mark.slow),
        (4, 13, 2),  # two class groups of two
        (4, 13, 4),  # every rank holds all classes
        (3, 1, 1),
    ],
)
def test_a_sharded_head_equals_the_definition(world_size, num_classes, data_axis):
    ranks = run_on_ranks(world_size, all_sharded_cases, num_classes, data_axis, False)
    check_against_definition(ranks, num_classes)


def test_a_sharded_head_with_many_blocks_equals_the_definition():
    check_against_definition(run_on_ranks(2, all_sharded_cases, 150, 1, True), 150)


@cache
def expected_of_11_rows(kind: str, weighting: str, num_classes: int):
    """The definition's results, computed once for all world sizes."""
    tree = label_tree(weighting, num_classes)
    return naive_loss_and_gradients(kind, tree, *problem(tree, num_rows=11, dim=5))


def check_against_definition(ranks, num_classes: int) -> None:
    for (kind, weighting), _ in ranks[0].items():
        tree = label_tree(weighting, num_classes)
        loss, by_features, by_nodes = expected_of_11_rows(kind, weighting, num_classes)
        held = np.zeros(tree.num_nodes, dtype=bool)
        for answers in ranks:
            got, (begin, end), (start, stop) = answers[kind, weighting]
            held[start:stop] = True
            np.testing.assert_allclose(got[0], loss, **EXACT)
            np.testing.assert_allclose(got[1], by_features[begin:end], **EXACT)
            np.testing.assert_allclose(got[2], by_nodes[start:stop], **EXACT)
        assert held.all()


def empty_shares():
    """The value of every loss for two rows on four ranks. Two of the ranks have no rows."""
    begin, end = shard_range(2, torch.distributed.get_rank(), 4)
    found = {}
    for kind in LOSS_KINDS:
        head = make_head(kind, "vtree", 13, 5, rank_mesh())
        features, labels, nodes = problem(head.tree, num_rows=2, dim=5)
        set_nodes(head, nodes)
        found[kind] = loss_and_gradients(head, features[begin:end], labels[begin:end])
    return found, (begin, end)


def test_ranks_without_rows_participate():
    tree = label_tree("vtree", 13)
    features, labels, nodes = problem(tree, num_rows=2, dim=5)
    ranks = run_on_ranks(4, empty_shares)
    for kind in LOSS_KINDS:
        loss, by_features, _ = naive_loss_and_gradients(kind, tree, features, labels, nodes)
        for found, (begin, end) in ranks:
            got_loss, got_features, _ = found[kind]
            np.testing.assert_allclose(got_loss, loss, **EXACT, err_msg=kind)
            np.testing.assert_allclose(got_features, by_features[begin:end], **EXACT, err_msg=kind)


def heads_of_each_kind(num_classes: int) -> list[ClassHead]:
    weights = torch.linspace(1, 2, num_classes)
    return [
        ClassHead(3, num_classes, LOSSES["ce"](), class_weights=weights, ignore_index=-100),
        HierarchicalSoftmaxHead(3, label_tree("vtree", num_classes), ignore_index=-100),
        FactoredHead(3, num_classes, SphericalSoftmax(), ignore_index=-100),
    ]


INTEGERS = {
    **{f"int{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
}


@pytest.mark.parametrize("dtype", INTEGERS.values(), ids=INTEGERS)
def test_labels_of_any_integer_dtype_are_class_ids(dtype):
    features, labels = torch.randn(4, 3), torch.tensor([1, 0, 4, 2])
    for head in heads_of_each_kind(300):  # more classes than 8 bits can represent
        head.eval()
        given = labels.to(dtype)
        torch.testing.assert_close(head(features, given), head(features, labels))
        torch.testing.assert_close(head.row_weights(given), head.row_weights(labels))


def test_a_label_above_int64_is_outside_the_classes_and_is_not_ignored():
    """A cast would wrap it to -100, which is `ignore_index`."""
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
def test_a_batch_loss_of_a_single_row_raises_in_training(kind):
    head = make_head(kind, "dense", 4, 3)
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        head(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([0]))


@pytest.mark.parametrize("kind", BATCH_LOSSES)
def test_a_batch_loss_of_a_single_row_is_defined_in_evaluation(kind):
    head = make_head(kind, "dense", 4, 3)
    features, labels, nodes = problem(head.tree, num_rows=1, dim=3)
    set_nodes(head, nodes)
    expected = naive_loss_and_gradients(kind, head.tree, features, labels, nodes)
    with torch.no_grad():
        np.testing.assert_allclose(head(features, labels), expected[0], **EXACT)
    for got, want in zip(loss_and_gradients(head.eval(), features, labels), expected, strict=True):
        np.testing.assert_allclose(got, want, **EXACT)


def single_row_in_the_global_batch():
    head = make_head("batch_ce", "dense", 4, 3, rank_mesh()).eval()
    rows = 1 if torch.distributed.get_rank() == 0 else 0
    features, labels = torch.ones(rows, 3, dtype=torch.float64), torch.zeros(rows).long()
    return head(features, labels).item()


def test_a_batch_loss_of_a_single_row_on_one_of_two_ranks_is_defined_in_evaluation():
    head = make_head("batch_ce", "dense", 4, 3).eval()
    expected = head(torch.ones(1, 3, dtype=torch.float64), torch.tensor([0])).item()
    losses = run_on_ranks(2, single_row_in_the_global_batch)
    assert losses == pytest.approx([expected] * 2, rel=1e-10)


def test_an_empty_batch_raises_an_error():
    head = make_head("ce", "dense", 4, 3)
    with pytest.raises(ValueError, match="no rows"):
        head(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("memory", ["one block, saved", "blocks of 64 nodes, recomputed"])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_scaling_a_loss_scales_its_gradients_and_gradients_of_two_calls_add_up(kind, memory):
    head = make_head(kind, "vtree", 70, 5)
    if memory != "one block, saved":
        object.__setattr__(head.engine, "memory_bytes", 1)
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


def test_autocast_computes_in_bf16_and_keeps_float32_weights_and_gradients():
    head = ClassHead(64, 50, LOSSES["ce"]())
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(32, 64, generator=generator)
    labels = torch.randint(50, (32,), generator=generator)
    exact = head(features, labels)
    exact.backward()
    want = head.weight.grad.clone()
    head.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = head(features, labels)
    rounded.backward()
    assert rounded.dtype == head.weight.grad.dtype == torch.float32
    assert head.weight.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)
    torch.testing.assert_close(head.weight.grad, want, rtol=0, atol=2e-2 * float(want.abs().max()))


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


def initial_rows(mesh=None):
    return {
        weighting: ClassHead(6, label_tree(weighting, 11), LOSSES["ce"](), mesh=mesh, seed=3)
        .weight.detach()
        .numpy()
        for weighting in WEIGHTINGS
    }


def initial_rows_of_a_rank():
    return initial_rows(rank_mesh())


def test_initial_rows_do_not_depend_on_the_world_size():
    ranks = run_on_ranks(3, initial_rows_of_a_rank)
    for weighting, alone in initial_rows().items():
        parts = [found[weighting] for found in ranks]
        np.testing.assert_array_equal(np.concatenate(parts), alone, err_msg=weighting)


def test_a_vtree_starts_as_the_same_classifier_as_dense_weights():
    dense, vtree = (
        ClassHead(6, label_tree(weighting, 40), LOSSES["ce"](), seed=3, init_std=0.5)
        for weighting in ("dense", "vtree")
    )
    rows = {
        name: torch.cat([block.rows[block.class_ids.argsort()] for block in head.class_rows()])
        for name, head in (("dense", dense), ("vtree", vtree))
    }
    torch.testing.assert_close(rows["dense"], rows["vtree"], rtol=0, atol=0)
    assert 0.4 < float(rows["dense"].std()) < 0.6
    for head in (dense, vtree):
        assert all((block.bias == 0).all() for block in head.class_rows())


WEIGHTED = [kind for kind in LOSS_KINDS if kind not in ("batch_ce", "batch_max_margin")]


@pytest.mark.parametrize("kind", WEIGHTED)
def test_class_weights_give_a_weighted_mean_and_ignored_rows_have_no_effect(kind):
    """As in torch.nn.functional.cross_entropy, the divisor is the sum of the weights."""
    num_classes, dim = 13, 5
    weights = torch.linspace(0.5, 2, num_classes, dtype=torch.float64)
    tree = label_tree("vtree", num_classes)
    head = ClassHead(
        dim,
        tree,
        make_loss(kind, num_classes),
        class_weights=weights,
        ignore_index=-7,
        dtype=torch.float64,
    )
    features, labels, nodes = problem(tree, num_rows=6, dim=dim)
    set_nodes(head, nodes)
    padded = torch.cat([features, torch.ones(2, dim, dtype=torch.float64)])
    value, by_features, by_nodes = loss_and_gradients(
        head, padded, torch.cat([labels, torch.tensor([-7, -7])])
    )
    shares = weights[labels] / weights[labels].sum()
    expected = [
        naive_loss_and_gradients(kind, tree, features[i : i + 1], labels[i : i + 1], nodes)
        for i in range(6)
    ]
    want = sum(float(share) * loss for share, (loss, _, _) in zip(shares, expected, strict=True))
    np.testing.assert_allclose(value, want, **EXACT)
    np.testing.assert_allclose(
        by_nodes, sum(float(s) * g for s, (_, _, g) in zip(shares, expected, strict=True)), **EXACT
    )
    assert (by_features[6:] == 0).all()


def test_batch_cross_entropy_with_weights_is_the_divergence_from_the_weighted_target():
    head = ClassHead(
        5,
        13,
        make_loss("batch_ce", 13),
        class_weights=torch.arange(13.0, dtype=torch.float64),
        dtype=torch.float64,
    )
    features, _, nodes = problem(head.tree, num_rows=4, dim=5)
    set_nodes(head, nodes)
    labels = torch.tensor([1, 2, 3, 2])
    z = naive_logits(head.tree, features, nodes)
    p = torch.tensor([1, 2, 3, 2], dtype=torch.float64) / 8
    q = z.exp() / z.exp().sum()
    want = (p * (p / q[torch.arange(4), labels]).log()).sum()
    torch.testing.assert_close(head(features, labels).detach(), want, rtol=1e-10, atol=1e-10)


def test_a_batch_of_ignored_rows_raises_an_error():
    head = ClassHead(3, 4, make_loss("ce", 4), ignore_index=0)
    with pytest.raises(ValueError, match="no rows with a positive weight"):
        head(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("weights", [torch.ones(3), torch.tensor([1.0, -1, 1, 1])])
def test_invalid_class_weights_are_rejected(weights):
    with pytest.raises(ValueError, match="class_weights of shape"):
        ClassHead(3, 4, make_loss("ce", 4), class_weights=weights)


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_rows_of_a_class_with_weight_zero_get_a_zero_gradient_and_no_nan(kind):
    weights = torch.ones(13, dtype=torch.float64)
    weights[0] = 0
    head = ClassHead(5, 13, make_loss(kind, 13), class_weights=weights, dtype=torch.float64)
    features, _, nodes = problem(head.tree, num_rows=4, dim=5)
    set_nodes(head, nodes)
    loss, by_features, by_nodes = loss_and_gradients(head, features, torch.tensor([0, 3, 0, 5]))
    assert np.isfinite(loss)
    assert np.isfinite(by_nodes).all()
    if kind not in ("batch_ce", "batch_max_margin"):  # they compare rows with each other
        assert (by_features[[0, 2]] == 0).all()


def test_a_batch_with_total_weight_zero_raises_an_error():
    weights = torch.tensor([0.0, 1, 1, 1])
    head = ClassHead(3, 4, make_loss("ce", 4), class_weights=weights)
    with pytest.raises(ValueError, match="no rows with a positive weight"):
        head(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one above 0"):
        ClassHead(3, 4, make_loss("ce", 4), class_weights=torch.zeros(4))


@pytest.mark.parametrize("head_type", [ClassHead, FactoredHead])
def test_the_features_of_an_ignored_row_have_no_effect(head_type):
    head = head_type(3, 4, SphericalSoftmax(), ignore_index=-1, init_std=0.5)
    features = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    features[1] = torch.nan
    labels = torch.tensor([0, -1, 2])
    features.requires_grad_()
    loss = head(features, labels)
    loss.backward()
    torch.testing.assert_close(loss, head(features[[0, 2]], labels[[0, 2]]))
    assert (features.grad[1] == 0).all()
    assert float(head.squared_gradient_norm()) > 0


def features_of_another_dtype_on_one_rank():
    head = make_head("ce", "dense", 4, 3, rank_mesh())
    dtype = (torch.float32, torch.float64)[torch.distributed.get_rank()]
    try:
        head(torch.zeros(1, 3, dtype=dtype), torch.tensor([0]))
    except ValueError as error:
        return str(error)


def test_features_of_another_dtype_on_one_rank_raise_an_error_on_all_ranks():
    for answer in run_on_ranks(2, features_of_another_dtype_on_one_rank):
        assert "differ in their dtype of features" in answer
