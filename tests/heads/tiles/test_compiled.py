"""The kernels compile for every supported GPU, without spilling registers.

Triton and its assembler need no GPU. The interpreter cannot show these facts: which instructions
compute the products, and whether float32 products are rounded to TF32.
"""

import json
import os
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from heads.losses import LOSSES
from heads.optional_triton import is_installed
from tests.heads.tiles.compile_kernels import MATRIX_INSTRUCTIONS

pytestmark = pytest.mark.skipif(not is_installed, reason="Triton is not installed")

AMPERE, HOPPER, BLACKWELL = 80, 90, 100
GPUS = dict(zip((AMPERE, HOPPER, BLACKWELL), MATRIX_INSTRUCTIONS, strict=True))
WITH_TILES = [kind for kind, loss in LOSSES.items() if loss.tile is not None]
CASES = [("ce", "bf16", gpu) for gpu in GPUS] + [("ce", "fp32", HOPPER)]
ALL_CASES = [
    case for case in product(WITH_TILES, ("bf16", "fp16", "fp32"), GPUS) if case not in CASES
]


def compiled(kind: str, dtype: str, gpu: int) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Triton 3.9 warns if this is not set, because its default will change.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    module = "tests.heads.tiles.compile_kernels"
    found = subprocess.run(
        [sys.executable, "-m", module, kind, dtype, str(gpu)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def check(kind: str, dtype: str, gpu: int) -> None:
    for kernel in compiled(kind, dtype, gpu):
        assert kernel["spilled"] == 0, kernel
        assert kernel["registers"] <= 255
        # The gradient of a maximum is 1 at the class that the first kernel found: the compiler
        # removes the product.
        has_product = (
            kind not in ("max_margin", "batch_max_margin") or "statistics" in kernel["kernel"]
        )
        uses_tensor_cores = dtype != "fp32" and has_product
        assert kernel["instructions"] == ([GPUS[gpu]] if uses_tensor_cores else [])


@pytest.mark.parametrize(("kind", "dtype", "gpu"), CASES)
def test_the_kernels_compile_without_spilling(kind: str, dtype: str, gpu: int) -> None:
    check(kind, dtype, gpu)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "gpu"), ALL_CASES)
def test_the_kernels_of_every_loss_compile_without_spilling(
    kind: str, dtype: str, gpu: int
) -> None:
    check(kind, dtype, gpu)
