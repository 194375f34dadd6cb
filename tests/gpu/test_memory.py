"""Memory that a step with a million classes uses beyond the weights and their gradient."""

from typing import Any

import numpy as np
import pytest
import torch

from heads import ClassHead, LabelTree
from heads.hierarchical import HierarchicalSoftmaxHead
from tests.heads.cases import LOSS_KINDS, make_loss

CLASSES, DIM, BATCH, MEMORY_MIB = 1_000_000, 64, 512, 256
MOST_BYTES = 300e6


def two_levels(num_classes: int) -> LabelTree:
    """A tree of about sqrt(K) pseudoclasses with sqrt(K) classes each."""
    above = num_classes + np.arange(num_classes) // int(num_classes**0.5)
    num_inner = int(above.max()) + 1 - num_classes
    parents = np.concatenate([above, np.full(num_inner, -1)])
    classes = np.concatenate([np.arange(num_classes), np.full(num_inner, -1)])
    return LabelTree.from_parents(parents, classes)


def make_head(kind: str, num_classes: int, device: torch.device) -> ClassHead:
    options: dict[str, Any] = {"memory_mib": MEMORY_MIB, "device": device}
    match kind:
        case "hierarchical_softmax":
            return HierarchicalSoftmaxHead(DIM, two_levels(num_classes), **options)
        case "ce over a vtree":
            tree: LabelTree | int = two_levels(num_classes)
            return ClassHead(DIM, tree, make_loss("ce", num_classes), **options)
    return ClassHead(DIM, num_classes, make_loss(kind, num_classes), **options)


def step(head: ClassHead) -> None:
    device = head.weight.device
    features = torch.randn(BATCH, DIM, device=device, requires_grad=True)
    head(features, torch.randint(head.num_classes, (BATCH,), device=device)).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*LOSS_KINDS, "ce over a vtree", "hierarchical_softmax"])
def test_a_step_allocates_at_most_300_mb_beyond_weights_and_gradient(cuda, kind):
    step(make_head(kind, 1000, cuda))  # allocates the workspaces of libraries
    head = make_head(kind, CLASSES, cuda)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(head)
    torch.cuda.synchronize()
    assert head.weight.grad is not None
    extra = torch.cuda.max_memory_allocated() - before - head.weight.grad.nbytes
    assert extra <= MOST_BYTES
