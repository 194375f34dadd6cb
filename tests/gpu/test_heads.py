"""Heads on a CUDA device match their float64 definitions and their results on the CPU."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import ClassHead, FusedSGD
from heads.losses import LOSSES, CrossEntropy, SmoothTopK
from heads.rows.initial_rows import normal_rows
from heads.rows.node_values import FP8
from tests.heads import test_logits, test_smooth_topk
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
            with torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
                found = step(head, features.float(), labels)
            for got, want in zip(found, expected, strict=True):
                error = np.linalg.norm(got.double().numpy() - want)
                assert error <= tolerance * np.linalg.norm(want), name


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
