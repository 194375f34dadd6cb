"""Heads on a CUDA device match their float64 definitions and their results on the CPU."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, FusedSGD
from heads.append import append_classes
from heads.hierarchical import HierarchicalSoftmaxHead
from heads.losses import LOSSES, CrossEntropy, SmoothTopK
from heads.rows.initial_rows import normal_rows
from heads.rows.node_values import FP8
from heads.slc import ClassMeasures, block_measures, pooled_thresholds
from heads.topk import largest_columns
from tests.heads import test_hierarchical, test_logits, test_sampling, test_smooth_topk
from tests.heads.cases import (
    LOGIT_MAPS,
    LOSS_KINDS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    naive_loss_and_gradients,
    problem,
    set_nodes,
)

LARGEST = ("max_margin", "batch_max_margin", "topk_hinge")
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def step(head: ClassHead, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients with respect to features and nodes, moved to the CPU."""
    device = head.weight.device
    mine = features.detach().to(device).requires_grad_()
    head.zero_grad()
    loss = head(mine, labels.to(device))
    loss.backward()
    assert loss.device == mine.grad.device == head.weight.grad.device == device
    return loss.detach().cpu(), mine.grad.cpu(), gradient_of_nodes(head).cpu()


def check(got, expected, **tolerance) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **tolerance)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_loss_and_gradients_equal_the_definition(device, kind, weighting):
    tree = label_tree(weighting, 70)
    loss = make_loss(kind, 70)
    head = ClassHead(7, tree, loss, device=device, dtype=torch.float64)
    features, labels, nodes = problem(tree, num_rows=9, dim=7)
    set_nodes(head, nodes)
    expected = naive_loss_and_gradients(kind, tree, features, labels, nodes)
    check(step(head, features, labels), expected, **EXACT)
    object.__setattr__(head.engine, "memory_bytes", 1)  # blocks of 64 nodes, computed twice
    check(step(head, features, labels), expected, **EXACT)


WITH_TILES = [kind for kind, loss in LOSSES.items() if loss.tile is not None]


@pytest.mark.parametrize("kind", WITH_TILES)
def test_compiled_tiles_equal_the_definition(device, kind):
    """In float32, and under autocast up to the rounding to bf16, which margins amplify."""
    for weighting, name in product(WEIGHTINGS, LOGIT_MAPS):
        if device.type == "cpu" and (weighting, name) != ("dense", "dot"):
            continue  # tests/heads/tiles interprets the kernels
        tree = label_tree(weighting, 13)
        head = ClassHead(
            test_logits.DIM,
            tree,
            make_loss(kind, 13),
            logits=LOGIT_MAPS[name],
            class_counts=test_logits.counts_of(13),
            device=device,
            tiles=True,
        )
        features, labels, nodes = problem(tree, test_logits.ROWS, test_logits.DIM)
        set_nodes(head, nodes)
        expected = test_logits.expected(name, kind, tree)[:3]
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.3)):
            if dtype is torch.bfloat16 and kind in LARGEST:
                continue  # another class may have the largest of the rounded logits
            with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
                found = step(head, features.float(), labels)
            for got, want in zip(found, expected, strict=True):
                error = np.linalg.norm(got.double().numpy() - want)
                assert error <= tolerance * np.linalg.norm(want), name


@pytest.mark.parametrize("weighting", ["utree", "vtree"])
def test_hierarchical_softmax_equals_its_definition(device, weighting):
    head, features, labels, _ = test_hierarchical.make_head(weighting, 70, 4, device=device)
    *expected, log_p = test_hierarchical.expected(weighting, 70, 4)
    check(step(head, features, labels), expected, **EXACT)
    for block in head.score_blocks(features.to(device), 7):
        want = log_p[:, block.class_ids.cpu().numpy()]
        np.testing.assert_allclose(block.scores.cpu(), want, **EXACT)


@pytest.mark.parametrize("weighting", ["dense", "vtree"])
@pytest.mark.parametrize("kind", test_sampling.LOSSES)
def test_sampled_steps_draw_the_same_classes_as_on_the_cpu(device, kind, weighting):
    here, features, labels, _ = test_sampling.sampled_head(kind, weighting, 150)
    there, *_ = test_sampling.sampled_head(kind, weighting, 150)
    there.to(device)
    for _ in range(3):
        check(step(there, features, labels), step(here, features, labels), **EXACT)
    assert there.draw == here.draw == 3


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_a_head_moved_to_the_device_matches_a_head_created_there(device, kind):
    options = {"class_weights": torch.arange(1, 14.0), "gradient_damping": 0.5}
    tree = label_tree("vtree", 13)
    made = ClassHead(5, tree, make_loss(kind, 13), device=device, **options)
    moved = ClassHead(5, tree, make_loss(kind, 13), **options).to(device)
    features, labels, _ = problem(tree, num_rows=9, dim=5)
    check(step(moved, features.float(), labels), step(made, features.float(), labels))


@pytest.mark.parametrize("deferred", [False, True], ids=["in backward", "deferred"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=["fp32", "bf16", "fp8"])
def test_fused_updates_match_the_cpu(device, dtype, weighting, deferred):
    """With Triton, a kernel updates the rows on the device."""
    tree, found = label_tree(weighting, 90), []
    features, labels, _ = problem(tree, num_rows=12, dim=6)
    for each in ("cpu", device):
        head = ClassHead(6, tree, CrossEntropy(), dtype=dtype, init_std=0.3, seed=5, device=each)
        optimizer = FusedSGD(head, lr=0.2, weight_decay=0.01, deferred=deferred)
        for _ in range(3):
            head(features.float().to(each).requires_grad_(), labels.to(each)).backward()
            norm = head.squared_gradient_norm()
            optimizer.step()
        rows = head.node_values().read(slice(0, len(head.weight))).float().cpu()
        found.append((rows, norm.cpu()))
    (here, norm_here), (there, norm_there) = found
    torch.testing.assert_close(norm_there, norm_here, rtol=1e-3, atol=0)
    if dtype == torch.float32:
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-6)
    else:
        # Sums differ in their last bits, so a few numbers are rounded to the other neighbor.
        assert (there != here).float().mean() < 0.02


def test_initial_rows_match_the_cpu(device):
    """log and cos may differ in the last bits of float64, so a few float32 numbers may round
    differently."""
    classes = torch.arange(5_000) * 20_011
    here, there = (normal_rows(classes.to(each), 64, seed=9, std=0.5) for each in ("cpu", device))
    assert there.device.type == device.type
    torch.testing.assert_close(there.cpu(), here, rtol=2e-7, atol=0)
    assert (there.cpu() != here).sum() <= 3


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_head_created_on_the_meta_device_can_be_moved_to_the_device(device, weighting):
    """Its index plan is on the meta device before the move."""
    tree = label_tree(weighting, 13)
    head = ClassHead(5, tree, CrossEntropy(), gradient_damping=0.5, device="meta")
    assert head.engine.weights.device.type == "meta"
    head.to_empty(device=device)
    made = ClassHead(5, tree, CrossEntropy(), gradient_damping=0.5, device=device)
    head.load_state_dict(made.state_dict())
    features, labels, _ = problem(tree, num_rows=9, dim=5)
    check(step(head, features.float(), labels), step(made, features.float(), labels))


@pytest.mark.parametrize("weighting", ["dense", "vtree"])
@pytest.mark.parametrize("kind", [*LOSS_KINDS, "hierarchical_softmax"])
def test_autocast_computes_in_bf16_and_keeps_float32_weights_and_gradients(device, kind, weighting):
    if kind == "hierarchical_softmax":
        head = HierarchicalSoftmaxHead(64, label_tree("vtree", 90), device=device, init_std=0.1)
    else:
        tree = label_tree(weighting, 90)
        head = ClassHead(64, tree, make_loss(kind, 90), device=device, init_std=0.1)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(32, 64, generator=generator)
    labels = torch.randint(90, (32,), generator=generator)
    exact = step(head, features, labels)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = step(head, features, labels)
        loss = head(features.to(device), labels.to(device))
    assert {tensor.dtype for tensor in inside} == {torch.float32}
    head.zero_grad()
    loss.backward()
    # Autocast has no effect on backward, because the head sets its own precision.
    torch.testing.assert_close(gradient_of_nodes(head).cpu(), inside[2], rtol=0, atol=0)
    assert not torch.equal(inside[2], exact[2])
    torch.testing.assert_close(inside[0], exact[0], rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(inside[1:], exact[1:], strict=True):
        assert ours.isfinite().all()
        # If two logits round to the same value, a different one may become the largest and get the
        # gradient.
        assert kind in LARGEST or (ours - theirs).norm() < 5e-2 * theirs.norm()


@pytest.mark.parametrize("blocks", [1, 6])
def test_smooth_topk_is_accurate_in_float32_for_every_temperature_and_scale(device, blocks):
    generator = torch.Generator().manual_seed(0)
    for tau in (0.001, 0.01, 0.1, 1.0):
        for std in (1.0, 3.0, 30.0):
            logits = std * torch.randn(16, 500, generator=generator)
            labels = torch.randint(500, (16,), generator=generator)
            # Half of the labels compete with the k-th largest score.
            labels[:8] = logits[:8].topk(8).indices.diagonal()
            taus = torch.full((16,), tau, dtype=torch.float64)
            values, gradients = test_smooth_topk.by_recursion(logits, labels, 5, taus, 1.0)
            value, gradient = test_smooth_topk.loss_and_gradient(
                SmoothTopK(5, tau, 1.0), logits.to(device), labels.to(device), blocks
            )
            assert value.dtype == gradient.dtype == torch.float32
            torch.testing.assert_close(value.cpu().double(), values.mean(), rtol=1e-5, atol=0)
            error = (16 * gradient.cpu().double() - gradients).norm(dim=1)
            assert (error <= 1e-4 * gradients.norm(dim=1).clamp(min=1e-6)).all()


@pytest.mark.parametrize("std", [1.0, 3.0, 30.0])
@pytest.mark.parametrize("tau", [0.001, 0.01, 0.1, 1.0])
def test_smooth_topk_is_finite_in_bf16(device, tau, std):
    head = ClassHead(16, 300, SmoothTopK(5, tau), init_std=std / 4, device=device)
    features = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = step(head, features, torch.arange(8))
    assert all(tensor.isfinite().all() for tensor in got)
    assert (got[1] != 0).any()


def test_invalid_input_raises_an_exception_instead_of_a_device_side_assertion(device):
    head = ClassHead(5, 13, CrossEntropy(), device=device)
    features = torch.zeros(3, 5, device=device)
    for labels in ([0, 1, 13], [0, -1, 1]):
        with pytest.raises(ValueError, match=r"outside 0\.\.12 \(1 in the global batch"):
            head(features, torch.tensor(labels, device=device))
    with pytest.raises(FloatingPointError, match="1 of 3 rows of features"):
        head(features.index_fill(0, torch.tensor([1], device=device), torch.nan), labels_of(head))
    head(features, labels_of(head)).backward()  # the device is still usable


def labels_of(head: ClassHead) -> Tensor:
    return torch.arange(3, device=head.weight.device)


def test_tensors_on_another_device_are_rejected(device):
    head = ClassHead(5, 13, CrossEntropy(), device=device)
    features, labels = torch.zeros(3, 5), torch.arange(3)
    elsewhere = "meta" if device.type == "cpu" else "cpu"
    for pair in (
        (features.to(elsewhere), labels.to(device)),
        (features.to(device), labels.to(elsewhere)),
    ):
        with pytest.raises(ValueError, match=f"on {elsewhere}.*all on {device.type}"):
            head(*pair)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_class_rows_scores_and_appended_classes_match_the_cpu(device, weighting):
    here, there = (grown(weighting, each) for each in ("cpu", device))
    assert there.num_classes == here.num_classes == 15
    expected, got = {}, {}
    features = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    for head, found in ((here, expected), (there, got)):
        moved = features.to(head.weight.device)
        blocks = zip(head.class_rows(5), head.score_blocks(moved, 5), strict=True)
        for rows, scores in blocks:
            assert rows.rows.device.type == scores.scores.device.type == head.weight.device.type
            assert torch.equal(rows.class_ids, scores.class_ids)
            for i, class_id in enumerate(rows.class_ids.tolist()):
                found[class_id] = torch.cat([rows.rows[i], scores.scores[:, i]]).cpu()
    assert sorted(got) == sorted(expected) == list(range(15))
    for class_id, values in expected.items():
        torch.testing.assert_close(got[class_id], values, rtol=1e-4, atol=1e-5)


def grown(weighting: str, device: torch.device | str) -> ClassHead:
    """A head trained with momentum for one step before and one step after appending two classes."""
    head = ClassHead(6, label_tree(weighting, 13), make_loss("ce", 13), device=device, init_std=0.5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(8, 6, generator=generator)
    for labels in (torch.arange(8), torch.arange(7, 15)):
        step(head, features, labels)
        optimizer.step()
        if head.num_classes == 13:
            append_classes(head, [-1, 0] if weighting != "dense" else [-1, -1], optimizer=optimizer)
    assert optimizer.state[head.weight]["momentum_buffer"].shape == head.weight.shape
    return head


def measured(scores: Tensor, labels: Tensor) -> ClassMeasures:
    ids = torch.arange(scores.shape[1], device=scores.device).flip(0)
    halves = zip(scores.split(20, 1), ids.split(20), strict=True)
    return ClassMeasures.concatenate([block_measures(part, labels, of) for part, of in halves])


def test_slc_measures_match_the_cpu(device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(400, 30, generator=generator).round(decimals=1)
    labels = torch.randint(-1, 25, (400,), generator=generator)
    here, there = measured(scores, labels), measured(scores.to(device), labels.to(device))
    for name in ("class_ids", "positives", "threshold", "precision_at", "average_precision"):
        got = getattr(there, name)
        assert got.device.type == device.type, name
        torch.testing.assert_close(
            got.cpu(), getattr(here, name), rtol=1e-12, atol=0, equal_nan=True
        )
    assert there.summary() == pytest.approx(here.summary(), rel=1e-12)
    pooled = pooled_thresholds(scores[:, 0].to(device))
    assert torch.equal(pooled.cpu(), pooled_thresholds(scores[:, 0]))


def test_ties_among_the_largest_go_to_the_lowest_id(device):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(4, (50, 40), generator=generator).float()
    ids = torch.randperm(40, generator=generator)
    got = ids[largest_columns(scores.to(device), ids.to(device), 5).cpu()]
    order = sorted(range(40), key=lambda column: int(ids[column]))
    for row, found in zip(scores, got, strict=True):
        best = sorted(order, key=lambda column: -float(row[column]))[:5]
        assert sorted(found.tolist()) == sorted(int(ids[column]) for column in best)
