"""A fused step of a million classes needs no gradient of all class rows, and no moments."""

import pytest
import torch

from benchmarks.timing import resident, restart_high_water_mark
from heads import ClassHead, CrossEntropy, FusedSGD
from heads.build import ROW_DTYPES

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
