"""Precisions in which a bundle's backbone runs, and what they require of a machine."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from data.extras import install_command

Precision = Literal["float32", "bf16", "int8"]
LowPrecision = Literal["bf16", "int8"]

# Flags of `/proc/cpuinfo`, of which one is required. Without such instructions, bf16 is slower than
# float32, and products of int8 saturate on x86, so scores would not match the thresholds.
_FLAGS: dict[str, frozenset[str]] = {
    "float32": frozenset(),
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "asimddp"}),
}


def onnx_is_installed() -> bool:
    """Return whether onnxruntime, which `OnnxBackbone` requires, is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def check_device(precision: Precision, device: str, *, on_this_machine: bool = True) -> None:
    """Raise ValueError if `device` cannot run a backbone in `precision`.

    Unless `on_this_machine` is false, also check the GPU, the processor and the packages of this
    machine.
    """
    if precision != "float32" and device != "cpu":
        raise ValueError(
            f"precision {precision} requires device cpu, but device is {device}: use device cpu or "
            "a bundle in float32"
        )
    if not on_this_machine:
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch cannot find a GPU. Use device cpu")
    check_processor(precision)
    if precision == "int8" and not onnx_is_installed():
        raise ValueError(
            "precision int8 requires onnxruntime, which is not installed: run "
            f"{install_command('onnx')}"
        )


def check_processor(precision: Precision, flags: frozenset[str] | None = None) -> None:
    """Raise ValueError if the processor has no instructions for `precision`. The default `flags`
    are those of this processor.
    """
    needed = _FLAGS[precision]
    if needed and not needed & (_flags() if flags is None else flags):
        raise ValueError(
            f"precision {precision} requires a processor with one of the flags "
            f"{', '.join(sorted(needed))} in /proc/cpuinfo, and this one has none: use a bundle in "
            "float32"
        )


@cache
def _flags() -> frozenset[str]:
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split() if found else ())
