"""Compiles the kernels ahead of time for GPUs that need not be there, and prints what they use.

`python -m tests.heads.tiles.compile_kernels ce:bf16:90` prints a line of JSON for each kernel. It
must run in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heads.losses import LOSSES
from heads.losses.tile import Reduction, Tile
from heads.tiles import kernels
from heads.tiles.launch import kernel_config, kernel_options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Instructions of the tensor cores of Ampere, Hopper and Blackwell.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
_INTEGERS = ("num_rows", "num_classes", "dim", "first_class", "first_split", "all_splits")
_IDS = ("class_ids", "labels", "winners")


def compiled(tile: Tile, num_vectors: int, dtype: str, capability: int) -> Iterator[dict[str, Any]]:
    """Yield the resources of both kernels for a loss with `tile`.

    `dtype` is that of features and rows, and `capability` is 10 times the compute capability.
    """
    config = kernel_config(tile, DTYPES[dtype], capability)
    options = kernel_options(tile, num_vectors, config)
    for kernel in (kernels.statistics_kernel, kernels.gradient_kernel):
        names = kernel.arg_names
        constants = {name: options[name] for name in names if name in options}
        if "SLOPES" in names:
            constants["SLOPES"] = tile.slopes
        if not num_vectors:
            constants["vectors"] = None
        if Reduction.MAX not in tile.reductions:
            constants["winners"] = None
        signature = {
            name: "constexpr" if name in constants else _type(name, dtype) for name in names
        }
        # Triton specializes a kernel for addresses and sizes that are multiples of 16.
        aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name == "dim"]
        result = triton.compile(
            ASTSource(
                kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
            ),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        )
        yield {
            "kernel": kernel.fn.__name__,
            "instructions": sorted(
                {name for name in (*MATRIX_INSTRUCTIONS, "tf32") if name in result.asm["ptx"]}
            ),
            "shared": result.metadata.shared,
            **_resources(result.asm["cubin"]),
        }


def _type(name: str, dtype: str) -> str:
    if name in _INTEGERS:
        return "i32"
    if name in _IDS:
        return "*i64"
    return f"*{dtype}" if name in ("features", "rows", "out") else "*fp32"


def _resources(cubin: bytes) -> dict[str, int]:
    """Return the number of registers per thread, and the bytes of spilled registers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        found = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"]}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, dtype, capability = case.split(":")
        tile = LOSSES[kind]().tile
        assert tile is not None
        for line in compiled(tile, 2 if kind == "nce" else 0, dtype, int(capability)):
            print(json.dumps(line))
