"""How the backbone of a bundle runs on a machine: its precision, what the precision requires, and
batch norms that are folded into convolutions, for faster inference on CPUs.
"""

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from data.extras import install_command
from trainer.backbone.backbone import Backbone
from trainer.backbone.config import Precision

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


# The largest change of a feature, relative to the largest feature, that rounding can explain.
_TOLERANCE = 1e-4


@torch.no_grad()  # not inference_mode: torch's bf16 convolutions fail with weights created in it
def fold_batch_norms(backbone: Backbone, example: dict[str, Tensor]) -> None:
    """Fold each batch norm of a backbone in evaluation mode into the convolution that is defined
    before it in the same module, and use convolutions in channels-last format.

    The order of definition need not be the order of computation. If the features of `example`
    change, the batch norms are kept.
    """
    pairs = list(_pairs(backbone))
    if not pairs:
        return
    try:
        expected = backbone(example)
    except (RuntimeError, IndexError):
        return  # the files do not match; the self-check of the model reports it
    for parent, (name, conv), (norm_name, norm) in pairs:
        setattr(parent, name, fuse_conv_bn_eval(conv, norm))
        setattr(parent, norm_name, nn.Identity())
    change = (backbone(example) - expected).abs().max()
    if not change <= _TOLERANCE * expected.abs().max():  # also true for NaN
        for parent, (name, conv), (norm_name, norm) in pairs:
            setattr(parent, name, conv)
            setattr(parent, norm_name, norm)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backbone.channels_last = True


def _pairs(
    backbone: nn.Module,
) -> Iterator[tuple[nn.Module, tuple[str, nn.Conv2d], tuple[str, nn.BatchNorm2d]]]:
    for parent in backbone.modules():
        for (name, conv), (norm_name, norm) in pairwise(parent.named_children()):
            if (
                isinstance(conv, nn.Conv2d)
                and isinstance(norm, nn.BatchNorm2d)
                and norm.num_features == conv.out_channels
            ):
                yield parent, (name, conv), (norm_name, norm)
