"""A fused step of a million classes needs no gradient of all class rows, and no moments; a step
with label sets needs no tensor of rows x classes."""

import pytest
import torch

from benchmarks.timing import resident, restart_high_water_mark
from heads import BinaryCrossEntropy, ClassHead, CrossEntropy, FusedSGD, LabelSets
from heads.build import ROW_DTYPES
from heads.losses import DecoupledSoftmax

CLASSES, DIM, BATCH, MEMORY_MIB = 1_000_000, 32, 32, 32


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "deferred"), [("bf16", False), ("fp32", True), ("fp8", True)])
def test_a_step_needs_less_memory_than_the_gradient_of_the_rows(dtype, deferred):
    options = {"dtype": ROW_DTYPES[dtype], "bias": False, "memory_mib": MEMORY_MIB}
    head = ClassHead(DIM, CLASSES, CrossEntropy(), **options)
    optimizer = FusedSGD(head, lr=0.1, deferred=deferred)
    features = torch.randn(BATCH, DIM, requires_grad=True)
    labels = torch.randint(CLASSES, (BATCH,))
    before = restart_high_water_mark()
    for _ in range(2):
        head(features, labels).backward()
        optimizer.step()
    # The gradient would have 128 MB. The logits of a step have at most half of `memory_mib`, and a
    # few temporaries the size of a block's rows.
    assert resident("VmHWM") - before < 2 * MEMORY_MIB << 20


@pytest.mark.slow
@pytest.mark.parametrize("loss", [CrossEntropy(), BinaryCrossEntropy(), DecoupledSoftmax()])
def test_a_step_with_label_sets_stays_below_the_memory_limit(loss):
    """An indicator of bytes would have 512 MB."""
    rows, dim, labels_per_row = 512, 64, 5
    head = ClassHead(dim, CLASSES, loss, bias=False, memory_mib=128)
    features = torch.randn(rows, dim, requires_grad=True)
    labels = torch.randint(CLASSES // labels_per_row, (rows, labels_per_row))
    labels += torch.arange(labels_per_row) * (CLASSES // labels_per_row)
    sets = LabelSets(labels.flatten(), labels_per_row * torch.arange(rows + 1))
    before = restart_high_water_mark()
    head(features, sets).backward()
    gradient = head.weight.grad.nbytes
    assert resident("VmHWM") - before - gradient < 128 << 20
