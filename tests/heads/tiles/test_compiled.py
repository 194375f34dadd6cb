"""The kernels compile for every supported GPU, without spilling registers.

Triton and its assembler need no GPU. The interpreter cannot show these facts: which instructions
compute the products, and whether float32 products are rounded to TF32.
"""

import json
import os
import subprocess
import sys
from itertools import product

import pytest

from heads.losses import LOSSES
from heads.losses.tile import MAX
from heads.optional_triton import is_installed
from tests.heads.tiles.compile_kernels import MATRIX_INSTRUCTIONS

pytestmark = pytest.mark.skipif(not is_installed, reason="Triton is not installed")

AMPERE, HOPPER, BLACKWELL = 80, 90, 100
GPUS = dict(zip((AMPERE, HOPPER, BLACKWELL), MATRIX_INSTRUCTIONS, strict=True))
WITH_TILES = [kind for kind, loss in LOSSES.items() if loss.tile is not None]
CASES = [("ce", "bf16", gpu) for gpu in GPUS] + [("ce", "fp32", HOPPER)]


def check(cases: list[tuple[str, str, int]]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Triton 3.9 warns if this is not set, because its default will change.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    module = "tests.heads.tiles.compile_kernels"
    found = subprocess.run(
        [sys.executable, "-m", module, *(":".join(map(str, case)) for case in cases)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = found.stdout.splitlines()
    assert len(lines) == 2 * len(cases)
    for (kind, dtype, gpu), line in zip(cases * 2, lines[::2] + lines[1::2], strict=True):
        kernel = json.loads(line)
        assert kernel["spilled"] == 0, (kind, dtype, gpu, kernel)
        # The gradient of a maximum is 1 at the class that the first kernel found: the compiler
        # removes the product.
        is_needed = LOSSES[kind].tile is not MAX or "statistics" in kernel["kernel"]
        uses_tensor_cores = dtype != "fp32" and is_needed
        assert kernel["instructions"] == ([GPUS[gpu]] if uses_tensor_cores else [])


def test_the_kernels_compile_without_spilling() -> None:
    check(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_TILES)
def test_the_kernels_of_every_loss_compile_without_spilling(kind: str) -> None:
    check(list(product([kind], ("bf16", "fp16", "fp32"), GPUS)))
