"""The kernels compile for every supported GPU, without spilling registers.

Triton and its assembler need no GPU. The interpreter cannot show these facts: which instructions
compute the products, whether float32 products are rounded to TF32, and whether the shared memory of
a GPU suffices.
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

pytestmark = pytest.mark.skipif(not is_installed, reason="Triton is not installed")

# The instructions of the tensor cores for each compute capability, times 10, and the largest shared
# memory of a program in KiB. 86 and 89: GPUs such as the RTX 3090, L4 and RTX 4090; 120: RTX 5090.
GPUS = {
    80: ("mma.sync", 163),
    86: ("mma.sync", 99),
    89: ("mma.sync", 99),
    90: ("wgmma.mma_async", 227),
    100: ("tcgen05.mma", 227),
    120: ("mma.sync", 99),
}
WITH_TILES = [kind for kind, loss in LOSSES.items() if loss.tile is not None]

Lines = list[dict[str, Any]]


def printed(*arguments: str) -> Lines:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Triton 3.9 warns if this is not set, because its default will change.
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    found = subprocess.run(
        [sys.executable, "-m", "tests.heads.tiles.compile_kernels", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def name_of(case: tuple[str, str, int]) -> str:
    return ":".join(map(str, case))


def check(found: Lines, cases: list[tuple[str, str, int]]) -> None:
    assert len(found) == 4 * len(cases)  # two kernels, with and without their optional arguments
    for kernel in found:
        _, dtype, gpu = kernel["case"]
        instruction, shared_kib = GPUS[gpu]
        assert kernel["spilled"] == 0, kernel
        assert kernel["shared"] <= shared_kib << 10, kernel
        assert kernel["instructions"] == ([] if dtype == "fp32" else [instruction]), kernel


def test_the_kernels_compile_without_spilling() -> None:
    check(printed("ce:bf16:90"), [("ce", "bf16", 90)])


@pytest.mark.slow
def test_the_updates_of_class_rows_compile_without_spilling() -> None:
    found = printed("update:fp8:80", "update:bf16:90", "update:fp32:100")
    assert len(found) == 12
    assert all(kernel["spilled"] == 0 for kernel in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_TILES)
def test_the_kernels_of_every_loss_compile_without_spilling(kind: str) -> None:
    cases = list(product([kind], ("bf16", "fp16", "fp32"), GPUS))
    check(printed(*map(name_of, cases)), cases)
