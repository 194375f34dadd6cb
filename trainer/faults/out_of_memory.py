"""Detects out-of-memory errors and suggests changes to the recipe.

The phase is determined from the traceback. Suggestions exclude settings that the recipe already
has.
"""

import errno
import re
import traceback
from types import FrameType

import torch

from heads.engine.block_size import Processor
from trainer.config import Recipe
from trainer.world import World

_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",  # raised by CUDA, and forwarded by NCCL and cuDNN
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",
    "MemoryError",  # from a data loader worker, whose error is passed on as text
)
# For each phase: the modules in the traceback that indicate it (the first phase with a match is
# used), and the changes in `_changes` that save memory in it, in the order of their cost.
_PHASES = {
    "building": ("(building)", "groups strategy rows"),
    "evaluation": ("trainer.evaluation", "evaluation head groups strategy precision"),
    "checkpoint": (
        "trainer.checkpoints torch.distributed.checkpoint",
        "background strategy groups",
    ),
    "data": ("data.", "workers background"),
    "head": ("heads.", "head groups micro precision rows strategy recompute"),
    "optimizer": (
        "trainer.optimizers trainer.ema torch.optim",
        "strategy groups rows ema micro precision recompute",
    ),
    "backward": ("torch.autograd", "micro precision recompute strategy groups head"),
    "forward": (
        "trainer.step. trainer.backbone. trainer.strategies transformers.",
        "micro precision recompute strategy groups head",
    ),
}
_MAX_SUGGESTIONS = 4
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of CUDA, torch, numpy, Python or Linux means that the device or the
    host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def advice(error: BaseException, recipe: Recipe, world: World, *, evaluating: bool = False) -> str:
    """Return one line with the requested memory, the phase, and the changes to try in this recipe.

    If `evaluating` is true, suggest options of `kway eval` instead.
    """
    text, kind = str(error), world.device.type
    phase = "data" if "DataLoader worker" in text else _phase(error)
    on_device = kind != "cpu" and (
        isinstance(error, torch.OutOfMemoryError)
        or any(word in text.upper() for word in ("CUDA", "CUBLAS", "NCCL", "CUDNN"))
    )
    keys = ["evaluation"] if evaluating else _PHASES[phase or "forward"][1].split()
    # Data loader workers use host memory. On CPUs, the model does, too, so it comes first.
    if kind == "cpu":
        keys += ["workers"] if evaluating else ["workers", "background"]
    elif not on_device:
        keys.insert(0, "workers")
    changes = _changes(recipe, world)
    found = [changes[key] for key in dict.fromkeys(keys) if key in changes]
    if evaluating:
        found = [f"--set {change}" for change in found]
        # Each process has its own device, but the processes on a host share the host memory.
        if on_device or world.size > 1:
            found.append(f"--nproc {2 * world.size if on_device else world.size // 2}")
    # torch has reserved enough memory, but in fragments that are too small.
    wanted, unused = _bytes(text, "Tried to allocate"), _bytes(text, "and", "is reserved by")
    if on_device and wanted and unused and wanted <= unused:
        found.insert(0, "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True")
    if found:
        fix = f"try {', then '.join(found[:_MAX_SUGGESTIONS])}"
    elif evaluating:
        fix = "the batches cannot be smaller: use a machine with more memory"
    else:
        fix = "no other recipe setting saves memory: use more ranks or a smaller backbone"
    owner = f"{kind} device {world.device.index or 0}" if on_device else "the machine"
    requested = _requested(text) or type(error).__name__
    return f"{owner} ran out of memory{f' in {phase}' if phase else ''}: {requested}; {fix}"


def _phase(error: BaseException) -> str | None:
    modules = [f"{_module(frame)}." for frame, _ in traceback.walk_tb(error.__traceback__)]
    for phase, (parts, _) in _PHASES.items():
        if any(module.startswith(part) for module in modules for part in parts.split()):
            return phase
    return None


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_name
    # If building the model fails, the model itself is too large, so smaller batches would not help.
    if function.startswith("build_") and name.startswith(("heads.", "trainer.")):
        return "(building)"
    # DeepSpeed's optimizers are in many modules, so detect them by their caller.
    if function == "step" and name.startswith("trainer.strategies"):
        return "torch.optim"
    return name


def _requested(text: str) -> str:
    """Return the amount of memory that was requested, or the first line of the error if it does not
    contain the amount."""
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        return f"an allocation of {int(found[1]) / 2**30:.3g} GiB failed"
    if found := re.search(r"(?:Tried|Unable) to allocate ([\d.]+ \w+)", text):
        total = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
        left = f" with {total[2]} of {total[1]} free" if total else ""
        return f"an allocation of {found[1]} failed{left}"
    return text.partition("\n")[0]


def _bytes(text: str, before: str, after: str = "") -> float | None:
    """Return the amount of memory that stands between two words of a message."""
    found = re.search(rf"{before} ([\d.]+) ({'|'.join(_UNITS)}) ?{after}", text)
    return None if found is None else float(found[1]) * 1024 ** _UNITS.index(found[2])


def _changes(recipe: Recipe, world: World) -> dict[str, str]:
    """Return the changes `key=value` for the keys in `_PHASES`, without those that the recipe
    already has or cannot have."""
    train, data, batch = recipe.train, recipe.data, recipe.evaluation.batch
    smaller = train.strategy.smaller(whole_tensors=recipe.optimizer.needs_whole_tensors)
    group = str(train.class_group)
    ranks = {"world": str(world.size), "node": str(world.local_size)}.get(group, group)
    memory_mib = recipe.head.memory_mib or Processor.of(world.device).default_memory_mib
    parts = 2 * train.micro_batches
    table = {
        "micro": (parts <= train.global_batch // world.size, f"train.micro_batches={parts}"),
        "precision": (train.precision == "fp32", "train.precision=bf16"),
        "recompute": (not train.activation_checkpointing, "train.activation_checkpointing=true"),
        "strategy": (
            smaller is not None and world.size > 1,
            "" if smaller is None else train.strategy.change_to(smaller),
        ),
        # Each rank then has fewer classes.
        "groups": (ranks != str(world.size), "train.class_group=world"),
        "head": (memory_mib > 1, f"head.memory_mib={memory_mib // 2}"),
        "rows": (recipe.can_have_bf16_rows, "head.dtype=bf16"),
        "ema": (train.ema is not None, "train.ema=null"),
        "evaluation": (batch > 1, f"evaluation.batch={batch // 2}"),
        "background": (recipe.checkpoint.in_background, "checkpoint.in_background=false"),
        "workers": (data.workers > 0, f"data.workers={data.workers // 2}"),
    }
    return {key: change for key, (applies, change) in table.items() if applies}
