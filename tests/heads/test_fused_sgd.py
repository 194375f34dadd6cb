"""Updating class rows during the backward pass equals SGD on the complete gradient."""

import copy
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
import torch

from heads import ClassHead, CrossEntropy, FactoredHead, FusedSGD
from heads.losses import LOSSES
from tests.heads import cases
from tests.heads.cases import (
    LOGIT_MAPS,
    WEIGHTINGS,
    facts,
    label_tree,
    label_vectors,
    make_loss,
    problem,
    set_nodes,
    share,
)
from tests.heads.test_frozen import Recorder
from tests.ranks import rank_mesh, run_on_ranks

KINDS = [kind for kind in LOSSES if kind != "hierarchical_softmax"]
LR, DECAY = 0.3, 0.02
EXACT = {"rtol": 1e-10, "atol": 1e-12}
sgd = partial(cases.sgd, lr=LR, weight_decay=DECAY)


def make_head(kind, weighting, mesh=None, *, logits=None, num_classes=70, damping=0.0, dtype=None):
    head = ClassHead(
        5,
        label_tree(weighting, num_classes),
        make_loss(kind, num_classes),
        logits=logits,
        mesh=mesh,
        class_counts=facts(num_classes).counts,
        label_vectors=label_vectors(num_classes),
        gradient_damping=damping,
        dtype=dtype or torch.float64,
    )
    object.__setattr__(head.engine, "memory_bytes", 1)  # blocks of 64 classes
    set_nodes(head, problem(head.tree, num_rows=11, dim=5)[2].to(head.weight.dtype))
    return head


def train(head, optimizer, features, labels, num_steps=2):
    """Take steps; return the weights, and the gradients of the features in the last step."""
    for _ in range(num_steps):
        leaf = features.clone().requires_grad_()
        optimizer.zero_grad()
        head(leaf, labels).backward()
        optimizer.step()
    assert leaf.grad is not None
    return [p.detach().clone() for p in head.parameters()], leaf.grad


def assert_same(got, want):
    for mine, other in zip([*got[0], got[1]], [*want[0], want[1]], strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


CASES = [
    *zip(KINDS, cycle([None]), cycle(WEIGHTINGS)),
    *zip(cycle(["ce"]), LOGIT_MAPS, cycle(WEIGHTINGS)),
]


@pytest.mark.parametrize("deferred", [False, True], ids=["in backward", "deferred"])
@pytest.mark.parametrize(("kind", "logits", "weighting"), CASES)
def test_steps_equal_those_of_sgd(kind, logits, weighting, deferred):
    options = {"logits": LOGIT_MAPS.get(logits), "damping": 0.5 if logits else 0.0}
    head, plain = (make_head(kind, weighting, **options) for _ in range(2))
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    fused = FusedSGD(head, lr=LR, weight_decay=DECAY, deferred=deferred)
    assert_same(train(head, fused, features, labels), train(plain, sgd(plain), features, labels))
    assert head.weight.grad is None


def all_sharded_steps(data_axis):
    return [
        (deferred, sharded_steps(weighting, data_axis, deferred))
        for weighting, deferred in product(WEIGHTINGS, (False, True))
    ]


def sharded_steps(weighting, data_axis, deferred):
    """The weights of this rank with both optimizers, and the norms of their last gradients."""
    mesh, mine, found = rank_mesh(data_axis), share(11), []
    for fuses in (True, False):
        head = make_head("batch_ce", weighting, mesh, damping=0.5)
        features, labels, _ = problem(head.tree, num_rows=11, dim=5)
        optimizer = sgd(head)
        if fuses:
            optimizer = FusedSGD(head, lr=LR, weight_decay=DECAY, deferred=deferred)
        train(head, optimizer, features[mine], labels[mine])
        optimizer.zero_grad()
        head(features[mine].requires_grad_(), labels[mine]).backward()
        norm = head.squared_gradient_norm()
        found.append((head.weight.detach().numpy(), head.bias.detach().numpy(), norm.item()))
    return found


@pytest.mark.parametrize(("world_size", "data_axis"), [(3, 1), (4, 2)])
def test_steps_on_ranks_equal_those_of_sgd(world_size, data_axis):
    for found in run_on_ranks(world_size, all_sharded_steps, data_axis):
        for deferred, (fused, plain) in found:
            np.testing.assert_allclose(fused[1], plain[1], **EXACT)
            np.testing.assert_allclose(fused[2], plain[2], **EXACT)
            if deferred:  # otherwise, the last backward pass has updated the rows
                np.testing.assert_allclose(fused[0], plain[0], **EXACT)


def test_sampled_classes_are_updated_and_the_others_keep_their_rows():
    heads = [
        ClassHead(5, 200, CrossEntropy(sample_rate=0.2), dtype=torch.float64) for _ in range(2)
    ]
    features, labels, _ = problem(heads[0].tree, num_rows=11, dim=5)
    before = heads[0].weight.detach().clone()
    got = train(heads[0], FusedSGD(heads[0], lr=LR), features, labels, 1)
    assert_same(
        got, train(heads[1], torch.optim.SGD(heads[1].parameters(), lr=LR), features, labels, 1)
    )
    assert 11 <= (heads[0].weight != before).any(1).sum() < 120
    FusedSGD(heads[0], lr=LR, weight_decay=DECAY)
    with pytest.raises(ValueError, match="set weight_decay=0"):
        heads[0](features, labels)


@pytest.mark.parametrize("deferred", [False, True], ids=["in backward", "deferred"])
def test_a_loss_that_is_not_finite_changes_no_row(deferred):
    head = make_head("ce", "vtree")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    features[3, 2] = torch.inf
    optimizer = FusedSGD(head, lr=LR, weight_decay=DECAY, deferred=deferred)
    before = head.weight.detach().clone()
    loss = head(features.requires_grad_(), labels, rows_of_ranks=[11])
    assert not loss.isfinite()
    loss.backward()
    optimizer.found_inf = torch.ones(())  # the caller's flag, for all other parameters
    optimizer.step()
    assert torch.equal(head.weight, before)


def test_only_a_deferred_gradient_can_be_scaled():
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    plain = make_head("ce", "dense")
    optimizer = FusedSGD(head, lr=LR, deferred=True)
    head(features.clone().requires_grad_(), labels).backward()
    head.scale_gradients(torch.tensor(0.5))
    optimizer.step()
    want = train(plain, torch.optim.SGD(plain.parameters(), lr=LR / 2), features, labels, 1)
    torch.testing.assert_close(head.weight, want[0][0], **EXACT)
    FusedSGD(head, lr=LR)
    head(features.clone().requires_grad_(), labels).backward()
    with pytest.raises(RuntimeError, match=r"use FusedSGD\(deferred=True\)"):
        head.scale_gradients(torch.tensor(0.5))


@pytest.mark.parametrize("deferred", [False, True], ids=["in backward", "deferred"])
def test_a_backward_pass_for_the_features_alone_changes_no_row(deferred):
    head, plain = make_head("ce", "vtree"), make_head("ce", "vtree")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    optimizer = FusedSGD(head, lr=LR, weight_decay=DECAY, deferred=deferred)
    leaf, before = features.clone().requires_grad_(), head.weight.detach().clone()
    loss = head(leaf, labels)
    (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
    loss.backward(inputs=[leaf], retain_graph=True)
    assert torch.equal(head.weight, before)
    assert torch.equal(leaf.grad, grad)
    loss.backward()  # the first backward pass of the step
    optimizer.step()
    want = train(plain, sgd(plain), features, labels, num_steps=1)
    torch.testing.assert_close(head.weight, want[0][0], **EXACT)
    torch.testing.assert_close(grad, want[1], **EXACT)


def test_a_grad_scaler_works_with_a_deferred_update():
    head, plain = make_head("ce", "dense"), make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    optimizer = FusedSGD(head, lr=LR, weight_decay=DECAY, deferred=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(head(features, labels)).backward()
    scaler.step(optimizer)
    want = train(plain, sgd(plain), features, labels, num_steps=1)[0]
    for mine, other in zip(head.parameters(), want, strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


def test_a_step_under_a_grad_scaler_changes_nothing_if_the_gradient_of_the_rows_overflows():
    head = ClassHead(5, 70, CrossEntropy())
    optimizer = FusedSGD(head, lr=LR, deferred=True)
    before = [p.detach().clone() for p in head.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    with torch.autocast("cpu", torch.float16):
        loss = head(torch.ones(2, 5), torch.tensor([0, 1]))
    scaler.scale(loss).backward()
    assert head.bias.grad.isfinite().all()
    scaler.step(optimizer)
    assert all(map(torch.equal, before, head.parameters()))


@pytest.mark.parametrize(("deferred", "unscales"), [(False, False), (False, True), (True, True)])
def test_a_grad_scaler_that_cannot_divide_the_gradient_of_the_rows_is_an_error(deferred, unscales):
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    optimizer = FusedSGD(head, lr=LR, deferred=deferred)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(head(features, labels)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="GradScaler") as caught:
        scaler.step(optimizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("deferred", [False, True], ids=["in backward", "deferred"])
def test_two_backward_passes_per_step_are_an_error(deferred):
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    optimizer = FusedSGD(head, lr=LR, deferred=deferred)
    head(features, labels).backward()
    with pytest.raises(RuntimeError, match="one backward pass per step"):
        head(features, labels).backward()
    optimizer.step()
    head(features, labels).backward()
    head.zero_grad()  # forgets the step
    head(features, labels).backward()


@pytest.mark.parametrize(
    "change", [ClassHead.eval, partial(ClassHead.requires_grad_, requires_grad=False)]
)
def test_a_head_that_is_frozen_or_in_evaluation_mode_is_not_updated(change):
    head = make_head("ce", "dense")
    FusedSGD(head, lr=LR)
    change(head)
    leaf, labels, _ = problem(head.tree, num_rows=11, dim=5)
    before = head.weight.detach().clone()
    head(leaf.requires_grad_(), labels).backward()
    assert torch.equal(head.weight, before)
    assert leaf.grad is not None


def test_the_norm_of_a_deferred_gradient_can_be_left_out():
    head = make_head("ce", "vtree", logits=LOGIT_MAPS["normface"])
    FusedSGD(head, lr=LR, deferred=True, needs_norm=False)
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    head(features.requires_grad_(), labels).backward()
    assert head.squared_gradient_norm() == 0


def test_loaded_rates_apply_to_the_class_rows():
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    optimizer = FusedSGD(head, lr=LR)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = 0.0
    optimizer.load_state_dict(state)
    before = head.weight.detach().clone()
    train(head, optimizer, features, labels)
    assert torch.equal(head.weight, before)


def test_only_the_newest_optimizer_of_a_head_can_step():
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    first, _ = FusedSGD(head, lr=LR), FusedSGD(head, lr=LR)
    head(features, labels).backward()
    with pytest.raises(RuntimeError, match="use only the newest one"):
        first.step()


@pytest.mark.parametrize(
    "module", [FactoredHead(5, 8, make_loss("quadratic", 8)), torch.nn.Linear(5, 8)]
)
def test_modules_without_updates_in_the_backward_pass_are_rejected(module):
    with pytest.raises(TypeError, match="pass a ClassHead"):
        FusedSGD(module, lr=LR)


def test_a_copy_of_a_head_and_its_optimizer_is_independent():
    head = make_head("ce", "dense")
    features, labels, _ = problem(head.tree, num_rows=11, dim=5)
    before = head.weight.detach().clone()
    other, optimizer = copy.deepcopy((head, FusedSGD(head, lr=LR)))
    train(other, optimizer, features, labels)
    assert torch.equal(head.weight, before)
    assert not torch.equal(other.weight, before)


def test_the_gradient_of_a_block_of_rows_fits_in_the_memory_limit():
    """The batch is small, so the rows of a block need more memory than its logits."""
    head = ClassHead(64, 5000, CrossEntropy(), memory_mib=1)
    features, labels = torch.randn(2, 64), torch.tensor([0, 4999])
    with Recorder() as recorder:
        FusedSGD(head, lr=LR)
        head(features, labels).backward()
    assert 4 * recorder.largest <= 1 << 20
