"""Compiles the kernels ahead of time for GPUs that need not be there, and prints what they use.

`python -m tests.heads.tiles.compile_kernels ce:bf16:90` prints a line of JSON for each kernel, with
and without its optional arguments. It must run in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heads.losses import LOSSES
from heads.losses.tile import Tile
from heads.rows import update_kernel
from heads.rows.update_kernel import BF16, FP8_E4M3, FP32, block_size, num_warps
from heads.tiles import kernels
from heads.tiles.launch import kernel_config, kernel_options

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = {"fp32": FP32, "bf16": BF16, "fp8": FP8_E4M3}
# Instructions of the tensor cores of Ampere, Hopper and Blackwell.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
_SIZES = ("num_rows", "num_classes", "dim", "first_class", "first_split", "all_splits")
# Arguments that are None with one label per row, and for logits without factors, bias, prior and
# offset.
_OPTIONAL = ("factors", "shifts", "column_sums", "label_offsets")


def compiled(tile: Tile, dtype: str, capability: int) -> Iterator[dict[str, Any]]:
    """Yield the resources of both kernels for a loss with `tile`.

    `dtype` is that of features and rows, and `capability` is 10 times the compute capability.
    """
    config = kernel_config(tile, DTYPES[dtype], capability)
    options = kernel_options(tile, config) | {"SLOPES": tile.slopes}
    both = kernels.statistics_kernel, kernels.gradient_kernel
    for kernel, has_optional in product(both, (True, False)):
        names = kernel.arg_names
        absent = {} if has_optional else dict.fromkeys(_OPTIONAL)
        constants = {name: value for name, value in (options | absent).items() if name in names}
        signature = {
            name: "constexpr" if name in constants else _type(name, dtype) for name in names
        }
        # The usual case: Triton specializes the kernels for these multiples of 16.
        aligned = [
            i
            for i, name in enumerate(names)
            if signature[name][0] == "*" or name in ("dim", "num_classes")
        ]
        result = triton.compile(
            ASTSource(
                kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned}
            ),
            target=GPUTarget("cuda", capability, 32),
            options=config.resources,
        )
        yield {
            "kernel": kernel.fn.__name__,
            "optional": has_optional,
            "instructions": sorted(
                {name for name in (*MATRIX_INSTRUCTIONS, "tf32") if name in result.asm["ptx"]}
            ),
            "shared": result.metadata.shared,
            **_resources(result.asm["cubin"]),
        }


def compiled_update(dtype: str, capability: int) -> Iterator[dict[str, Any]]:
    """Yield the resources of the kernel that updates rows of 100 and of 2,048 numbers."""
    kernel = update_kernel.update_kernel
    pointer = {"fp32": "*fp32", "bf16": "*bf16", "fp8": "*u8"}[dtype]
    types = {"held": pointer, "scales": "*bf16", "nodes": "*i64", "keeps": "*u8", "key": "i64"}
    types |= {"lr": "fp32", "weight_decay": "fp32", "first_node": "i64"}
    for dim, has_optional in product((100, 2048), (True, False)):
        constants = {"FORMAT": FORMATS[dtype], "KEEPS_EACH": has_optional}
        constants |= {"BLOCK_D": block_size(dim)}
        if not has_optional:
            constants |= dict.fromkeys(("scales", "nodes", "divisor"))
        if dtype == "fp8":
            constants.pop("scales", None)
        signature = {
            name: "constexpr"
            if name in constants
            else types.get(name, "i32" if name == "dim" else "*fp32")
            for name in kernel.arg_names
        }
        result = triton.compile(
            ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps(dim)},
        )
        shared = result.metadata.shared
        yield {"dim": dim, "shared": shared, **_resources(result.asm["cubin"])}


def _type(name: str, dtype: str) -> str:
    if name in _SIZES:
        return "i32"
    if name in ("labels", "label_offsets"):
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
            timeout=120,
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", found)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"]}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, dtype, capability = case.split(":")
        if kind == "update":
            for line in compiled_update(dtype, int(capability)):
                print(json.dumps({"case": [kind, dtype, int(capability)]} | line))
            continue
        tile = LOSSES[kind]().tile
        assert tile is not None
        for line in compiled(tile, dtype, int(capability)):
            print(json.dumps({"case": [kind, dtype, int(capability)]} | line))
