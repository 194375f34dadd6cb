"""Variables that change how torch, NCCL and gloo behave: those that are set, those that hurt."""

import os
from collections.abc import Iterator

from launch.doctor.finding import Finding, ok, warning
from launch.doctor.plans import Plans

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "CUDA_")
_SHOWN = 6
# Name -> (the values that hurt, what they do).
_HURTFUL = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "each kernel is waited for: for debugging only"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of a machine exchange through its memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs without peer access exchange through the network"),
    "NCCL_IB_DISABLE": (("1",), "InfiniBand and RoCE are left unused"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank prints much: for debugging only"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "the CPU waits in each collective"),
}


def variables(plans: Plans) -> Iterator[Finding]:
    """What is set of them, and each that slows training down."""
    names = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    hurtful = []
    for name in names:
        values, what = _HURTFUL.get(name, ((), ""))
        if os.environ[name].upper() in values:
            hurtful.append(name)
            yield warning("variables", f"{name}={os.environ[name]}: {what}", f"unset {name}")
    rest = [name for name in names if name not in hurtful]
    more = f" and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    if rest:
        shown = ", ".join(f"{name}={os.environ[name]}" for name in rest[:_SHOWN])
        yield ok("variables", f"{shown}{more}")
    elif not hurtful:
        yield ok("variables", "none of NCCL's, gloo's or torch.distributed's is set")
