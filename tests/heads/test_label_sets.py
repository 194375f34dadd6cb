"""Losses with label sets match their definitions in one process, and reject what they cannot do."""

from itertools import cycle

import numpy as np
import pytest
import torch

from heads import ClassHead, FactoredHead, FusedSGD, HierarchicalSoftmaxHead, LabelSets
from heads.label_sets import concatenate_labels
from heads.losses import LOSSES, Asymmetric, Block, LabelPositions, Rows
from heads.rows.node_values import FP8
from tests.heads.cases import (
    LOGIT_MAPS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    problem,
    set_nodes,
)
from tests.heads.set_cases import (
    OF_LABELS,
    SET_KINDS,
    expected_with_sets,
    label_sets,
    make_set_head,
    naive_set_loss,
    tensors_of_weights,
    weights_of,
)
from tests.heads.test_logits import DIM, step

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ROWS = 11


@pytest.mark.parametrize("name", LOGIT_MAPS)
@pytest.mark.parametrize("memory_bytes", [None, 30_000, 1], ids=["graphs", "logits", "nothing"])
def test_loss_and_gradients_equal_the_definition(name, memory_bytes):
    """Forward saves graphs, the logits of the first blocks, or nothing. With 150 classes and a
    small limit, the labels of a row are in several blocks."""
    for kind, weighting in zip(SET_KINDS, cycle(WEIGHTINGS)):
        head = make_set_head(name, kind, weighting, 13 if memory_bytes is None else 150)
        object.__setattr__(head.engine, "memory_bytes", memory_bytes)
        features, _, nodes = problem(head.tree, ROWS, DIM)
        set_nodes(head, nodes)
        sets = LabelSets.of(label_sets(head.num_classes, ROWS))
        found = step(head, features, sets)
        want = expected_with_sets(name, kind, head.tree, ROWS)
        for got, each in zip(found, want, strict=True):
            np.testing.assert_allclose(got, each, **EXACT, err_msg=f"{kind} {weighting}")


@pytest.mark.parametrize("kind", SET_KINDS)
def test_row_weights_and_class_weights_multiply_the_terms_of_labels(kind):
    weights, options = tensors_of_weights(kind)
    head = make_set_head("dot", kind, "vtree", 13, **options)
    features, _, nodes = problem(head.tree, ROWS, DIM)
    set_nodes(head, nodes)
    features.requires_grad_()
    rows = label_sets(13, ROWS)
    sets = LabelSets.of(rows)
    loss = head(features, sets, weights)
    loss.backward()
    want, by_features, by_nodes, *_ = expected_with_sets(
        "dot", kind, head.tree, ROWS, weights_of(kind)
    )
    np.testing.assert_allclose(loss.detach(), want, **EXACT)
    np.testing.assert_allclose(features.grad, by_features, **EXACT)
    np.testing.assert_allclose(gradient_of_nodes(head), by_nodes, **EXACT)
    # `row_weights` are the shares of the rows: parts of a batch with them add up to its loss.
    if kind == "batch_ce":
        return
    parts = [slice(0, 2), slice(3, 6), slice(6, 11)]  # row 2 has the weight 0
    shares = [head.row_weights(sets[part], weights[part]).sum() for part in parts]
    losses = [head(features[part], sets[part], weights[part]) for part in parts]
    total = sum(share * each for share, each in zip(shares, losses, strict=True)) / sum(shares)
    np.testing.assert_allclose(total.detach(), want, **EXACT)


@pytest.mark.parametrize("kind", SET_KINDS)
def test_sets_of_one_label_equal_one_label_per_row(kind):
    head = make_set_head("cosine", kind, "utree", 13)
    features, labels, nodes = problem(head.tree, ROWS, DIM)
    set_nodes(head, nodes)
    sets = LabelSets(labels, torch.arange(ROWS + 1))
    found = []
    for each in (labels, sets, LabelSets(labels.int(), sets.offsets.int())):
        head.zero_grad()
        head.draw = 0
        found.append(step(head, features, each))
    for one, *others in zip(*found, strict=True):
        for other in others:
            np.testing.assert_allclose(other, one, **EXACT)


@pytest.mark.parametrize("kind", SET_KINDS)
def test_a_batch_of_empty_rows_has_no_positive_terms(kind):
    head = make_set_head("dot", kind, "dense", 13)
    features, _, nodes = problem(head.tree, 3, DIM)
    set_nodes(head, nodes)
    features.requires_grad_()
    nothing = LabelSets.of([[], [], []])
    loss = head(features, nothing, rows_of_ranks=[3])
    loss.backward()
    if kind in OF_LABELS:
        assert loss == 0
        assert not gradient_of_nodes(head).any()
        with pytest.raises(ValueError, match="no row of the global batch has a label"):
            head(features, nothing)
        with pytest.raises(ValueError, match="no rows with a positive weight"):
            head(features, LabelSets.of([[1], [], []]), torch.zeros(3))
    else:
        z = head.logits(features, next(head.class_rows())).detach()
        z = z + head.engine.log_prior
        np.testing.assert_allclose(loss.detach(), naive_set_loss(kind, z, [[]] * 3), **EXACT)
        np.testing.assert_allclose(head(features, nothing).detach(), loss.detach(), **EXACT)
    for name, weighting in (("arcface", "vtree"), ("cosine", "utree")):
        head = make_set_head(name, kind, weighting, 13)
        head(features, nothing, rows_of_ranks=[3]).backward()
        assert gradient_of_nodes(head).isfinite().all()


def test_a_row_whose_labels_are_all_classes_has_no_negatives():
    head = make_set_head("dot", "decoupled_softmax", "dense", 13)
    features, _, nodes = problem(head.tree, 2, DIM)
    set_nodes(head, nodes)
    features.requires_grad_()
    loss = head(features, LabelSets.of([range(13), [1]]))
    loss.backward()
    assert (features.grad[0] == 0).all()
    assert features.grad[1].any()
    assert gradient_of_nodes(head).isfinite().all()


@pytest.mark.parametrize("kind", ["ce", "nce", "decoupled_softmax"])
def test_a_sampled_loss_computes_the_labels_of_all_sets(kind):
    options = {"samples": 5, "noise": "uniform"} if kind == "nce" else {"sample_rate": 0.3}
    head = ClassHead(DIM, 60, LOSSES[kind](**options), dtype=torch.float64, seed=3)
    features, _, nodes = problem(head.tree, ROWS, DIM)
    set_nodes(head, nodes)
    rows = label_sets(60, ROWS)
    sets = LabelSets.of(rows)
    choice = head.loss.choose(head.engine.weights.held, sets.labels, (3 << 32) % 2**63)
    assert 0 < len(choice.positions) < 60
    z = head.logits(features, next(head.class_rows())).detach()[:, choice.positions]
    chosen = {int(position): i for i, position in enumerate(choice.positions)}
    at = [[chosen[y] for y in row] for row in rows]
    biased = z + choice.weights.log()
    if kind == "ce":
        terms = [biased[i].logsumexp(0) - z[i, at[i]].mean() for i in range(ROWS) if at[i]]
    elif kind == "decoupled_softmax":
        terms = []
        for i in range(ROWS):
            negatives = [j for j in range(len(choice.positions)) if j not in at[i]]
            total = z[i, at[i]].exp() + biased[i, negatives].exp().sum()
            terms += [(total.log() - z[i, at[i]]).sum()] if at[i] else []
    else:
        log_tq = np.log(10 / 60)
        terms = [
            torch.nn.functional.softplus(log_tq - z[i, at[i]]).sum()
            + 10 / 60 * torch.nn.functional.softplus(z[i] - log_tq) @ choice.weights
            for i in range(ROWS)
        ]
    np.testing.assert_allclose(head(features, sets).detach(), torch.stack(terms).mean(), **EXACT)


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_the_asymmetric_loss_without_a_margin_is_the_focal_loss(gamma):
    """With gamma 0, it is `bce`. The values and gradients of large logits are finite."""
    loss = Asymmetric(gamma_positive=gamma, gamma_negative=gamma, margin=0)
    z = torch.linspace(-30, 30, 13, dtype=torch.float64, requires_grad=True)
    rows = Rows(13, torch.tensor([4, 9]), None, LabelSets.of([[4, 9]]))
    true = z[[4, 9]]
    block = Block(torch.arange(13), rows.labels, None, true)
    found = loss.value(loss.statistics(z[None], block), rows)
    is_label = torch.zeros(13, dtype=torch.bool)
    is_label[[4, 9]] = True
    right = torch.where(is_label, z, -z).sigmoid()  # the probability of what is right
    wrong = torch.where(is_label, -z, z).sigmoid()
    torch.testing.assert_close(found, (-(wrong**gamma) * right.log()).sum(), rtol=1e-10, atol=1e-10)
    far = torch.tensor([[-300.0, 300.0]], requires_grad=True)
    for each in (loss, Asymmetric(0.5, 0.5), Asymmetric()):
        of_one = Rows(2, torch.tensor([0]))
        block = Block(torch.arange(2), of_one.labels, None, far[:, 0])
        value = each.value(each.statistics(far, block), of_one)
        (gradient,) = torch.autograd.grad(value, far)
        assert value.isfinite()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("gamma", [0.0, 0.02, 0.5, 4.0])
@pytest.mark.parametrize("margin", [0.0, 0.2])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_saved_derivative_of_the_asymmetric_loss_is_that_of_its_terms(
    gamma, margin, dtype, atol, monkeypatch
):
    """Also below the margin, and if the rows are processed in pieces."""
    monkeypatch.setattr("heads.losses.asymmetric._ELEMENTS", 60)
    loss = Asymmetric(0.0, gamma, margin)
    generator = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(7, 20, generator=generator, dtype=dtype)
    z.requires_grad_()
    block = Block(torch.arange(20), torch.zeros(7, dtype=torch.long), None, z[:, 0])
    found = loss.statistics(z, block)[0]
    q = torch.relu(z.sigmoid() - margin)
    log = torch.log1p(-q) if margin else -torch.nn.functional.softplus(z)
    expected = -(q**gamma * log).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=10 * atol)
    weights = torch.arange(7.0, dtype=dtype)
    (gradient,) = torch.autograd.grad(found, z, weights)
    (right,) = torch.autograd.grad(expected, z, weights)
    torch.testing.assert_close(gradient, right, rtol=1e-10, atol=atol)


def test_labels_in_other_blocks_do_not_overwrite_those_of_a_block():
    """Columns outside the block are clamped to positions of labels inside it."""
    matrix = torch.arange(12.0).view(2, 6)
    rows = torch.tensor([0, 0, 0, 0, 1, 1])
    columns = torch.tensor([-3, 0, 5, 9, -1, 8])
    for order in (torch.arange(6), torch.arange(5, -1, -1)):
        positions = LabelPositions.of(columns[order], 6, rows[order])
        found = positions.put(matrix.clone(), -torch.arange(1.0, 7.0)[order])
        assert found[0].tolist() == [-2, 1, 2, 3, 4, -3]
        assert (found[1] == matrix[1]).all()
        assert positions.put(matrix.clone(), 0)[0].tolist() == [0, 1, 2, 3, 4, 0]
        added = positions.add(matrix.clone(), torch.ones(6))
        assert (added - matrix).tolist() == [[1, 0, 0, 0, 0, 1], [0] * 6]
    elsewhere = LabelPositions.of(torch.tensor([7, 8]), 6, torch.tensor([0, 0]))
    assert (elsewhere.put(matrix.clone(), -1.0) == matrix).all()
    empty = torch.empty(0, dtype=torch.long)
    assert (LabelPositions.of(empty, 6, empty).put(matrix.clone(), -1.0) == matrix).all()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("weighting", ["dense", "vtree"])
def test_fused_updates_equal_plain_sgd(weighting, deferred):
    for kind in SET_KINDS:
        heads = [make_set_head("arcface", kind, weighting, 150) for _ in range(2)]
        optimizers = [
            FusedSGD(heads[0], lr=0.3, deferred=deferred),
            torch.optim.SGD(heads[1].parameters(), lr=0.3),
        ]
        features, _, nodes = problem(heads[0].tree, ROWS, DIM)
        sets = LabelSets.of(label_sets(150, ROWS))
        for head, optimizer in zip(heads, optimizers, strict=True):
            object.__setattr__(head.engine, "memory_bytes", 1)
            set_nodes(head, nodes)
            head(features, sets).backward()
            optimizer.step()
        found, want = (head.weight.detach() for head in heads)
        np.testing.assert_allclose(found, want, **EXACT, err_msg=kind)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_row_without_labels_makes_the_loss_nan(broken):
    """Otherwise, a fused update would write the NaN of its gradient to the class rows."""
    for kind in SET_KINDS:
        head = make_set_head("dot", kind, "dense", 13)
        FusedSGD(head, lr=0.1)
        before = head.weight.detach().clone()
        features = torch.ones(2, DIM, dtype=torch.float64)
        features[1] = broken
        loss = head(features, LabelSets.of([[0, 3], []]), rows_of_ranks=[2])
        loss.backward()
        assert loss.isnan(), kind
        assert (head.weight == before).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_rows_of_few_bits_give_the_loss_of_their_values(dtype):
    for kind in SET_KINDS:
        head = make_set_head("dot", kind, "dense", 40, dtype=dtype, init_std=0.5).eval()
        wide = make_set_head("dot", kind, "dense", 40, dtype=torch.float32).eval()
        with torch.no_grad():
            wide.weight.copy_(head.node_values().read(slice(0, 40)))
        features = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
        sets = LabelSets.of(label_sets(40, ROWS))
        torch.testing.assert_close(head(features, sets), wide(features, sets))


# ---- errors -------------------------------------------------------------------------------------


def test_a_loss_of_one_label_per_row_names_the_losses_that_accept_sets():
    sets = LabelSets.of([[0, 2], [1]])
    heads = [
        *(ClassHead(3, 7, make_loss(kind, 7)) for kind in ("self_norm", "simloss", "smooth_topk")),
        FactoredHead(3, 7, make_loss("quadratic", 7)),
        HierarchicalSoftmaxHead(3, label_tree("vtree", 7)),
    ]
    for head in heads:
        with pytest.raises(ValueError, match=f"one of {', '.join(SET_KINDS)}"):
            head(torch.zeros(2, 3), sets)
        with pytest.raises(ValueError, match=f"one of {', '.join(SET_KINDS)}"):
            head.check_label_sets()
    assert SET_KINDS == ("ce", "batch_ce", "decoupled_softmax", "nce", "bce", "asymmetric")


@pytest.mark.parametrize("kind", [kind for kind in SET_KINDS if kind not in OF_LABELS])
def test_class_weights_of_a_loss_over_all_classes_are_an_error(kind):
    head = ClassHead(3, 7, make_loss(kind, 7), class_weights=torch.ones(7))
    for weights in (None, torch.ones(2)):
        with pytest.raises(ValueError, match=f"{kind} does not support class weights with label"):
            head(torch.zeros(2, 3), LabelSets.of([[0, 2], [1]]), weights)
    assert head(torch.zeros(2, 3), torch.tensor([0, 1])).isfinite()


INVALID = {
    "labels of floats": (torch.tensor([0.0, 2, 1]), torch.tensor([0, 2, 3])),
    "a label twice in a row": (torch.tensor([2, 2, 1]), torch.tensor([0, 2, 3])),
    "labels that descend": (torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])),
    "offsets that descend": (torch.tensor([0, 2, 1]), torch.tensor([0, 5, 3])),
    "offsets from 1": (torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3])),
    "offsets to 2": (torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2])),
    "another number of rows": (torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2, 3])),
    "no offsets": (torch.tensor([0, 2, 1]), torch.tensor([], dtype=torch.long)),
    "a matrix": (torch.tensor([[0, 2, 1]]), torch.tensor([0, 2, 3])),
    "a list": ([0, 2, 1], torch.tensor([0, 2, 3])),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_sets_are_rejected(name):
    head = ClassHead(3, 7, make_loss("bce", 7))
    with pytest.raises(ValueError, match="or as LabelSets of b rows with distinct labels in asc"):
        head(torch.zeros(2, 3), LabelSets(*INVALID[name]))


def test_sets_are_made_of_integers_of_any_type():
    rows = [torch.tensor([3, 1, 3]), np.array([2, 2]), range(2)]
    assert LabelSets.of(rows).labels.tolist() == [1, 3, 2, 0, 1]
    for wrong in ([0.5], torch.tensor([1.0]), "3"):
        with pytest.raises(TypeError):
            LabelSets.of([wrong])


def test_parts_are_concatenated_and_classes_are_renamed_within_their_rows():
    rows = [[3, 7], [], [5], [0, 1, 2]]
    sets = LabelSets.of(rows)
    again = concatenate_labels([sets[:1], sets[1:1], sets[1:]])
    assert torch.equal(again.labels, sets.labels)
    assert torch.equal(again.offsets, sets.offsets)
    assert torch.equal(
        concatenate_labels([torch.arange(2), torch.arange(1)]), torch.tensor([0, 1, 0])
    )
    renamed = sets.mapped(9 - torch.arange(10))
    assert [renamed[row : row + 1].labels.tolist() for row in range(4)] == [
        [2, 6],
        [],
        [4],
        [7, 8, 9],
    ]
    narrow = LabelSets(sets.labels.int(), sets.offsets.int())
    for each in (sets, narrow):
        found = each.contain(torch.tensor([[7, 8], [0, 1], [5, 3], [2, 9]]))
        assert found.tolist() == [[True, False], [False, False], [True, False], [True, False]]
