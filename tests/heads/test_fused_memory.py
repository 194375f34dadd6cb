"""A fused step of a million classes needs no gradient of all class rows, and no moments."""

import subprocess
import sys

import pytest

from tests.heads.fused_memory import CLASSES, DIM, MEMORY_MIB

BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "when"), [("bf16", "in_backward"), ("fp32", "deferred"), ("fp8", "deferred")]
)
def test_a_step_needs_less_memory_than_the_gradient_of_the_rows(dtype, when):
    command = [sys.executable, "-m", "tests.heads.fused_memory", dtype, when]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    rows, extra = map(int, done.stdout.split())
    assert rows == CLASSES * DIM * BYTES[dtype]
    # The gradient would have 128 MB. The logits of a step have at most half of `memory_mib`, and a
    # few temporaries the size of a block's rows.
    assert extra < 2 * MEMORY_MIB << 20
