"""Detects out-of-memory errors and suggests changes to the recipe.

The phase is determined from the traceback. Suggestions are ordered by their cost in that phase,
cheapest first, and exclude settings that the recipe already has.
"""

import errno
import re
import traceback
from collections.abc import Iterator
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
# The phase for each kway, torch or transformers module in the traceback. The first match is used.
_PHASES = {
    "building": ("(building)",),
    "evaluation": ("trainer.evaluation",),
    "checkpoint": ("trainer.checkpoints", "torch.distributed.checkpoint"),
    "data": ("data.",),
    "head": ("heads.",),
    "optimizer": ("trainer.optimizers", "trainer.ema", "torch.optim"),
    "backward": ("torch.autograd",),
    "forward": ("trainer.step.", "trainer.backbone.", "trainer.strategies", "transformers."),
}
_TRAINING = ("micro", "precision", "recompute", "strategy", "groups", "head")
_ORDER = {
    "building": ("groups", "strategy", "rows"),
    "forward": _TRAINING,
    "backward": _TRAINING,
    "head": ("head", "groups", "micro", "precision", "rows", "strategy", "recompute"),
    "optimizer": ("strategy", "groups", "rows", "ema", "micro", "precision", "recompute"),
    "evaluation": ("evaluation", "head", "groups", "strategy", "precision"),
    "checkpoint": ("background", "strategy", "groups"),
    "data": ("workers", "background"),
}
_MAX_SUGGESTIONS = 4
_NO_SUGGESTION = "no other recipe setting saves memory: use more ranks or a smaller backbone"
_NO_SUGGESTION_FOR_EVALUATION = "the batches cannot be smaller: use a machine with more memory"


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
    phase = _phase(error)
    on_device = world.device.type != "cpu" and _is_of_device(error)
    owner = f"{world.device.type} device {world.device.index or 0}" if on_device else "the machine"
    during = f" in {phase}" if phase else ""
    if evaluating:
        suggestions = list(_evaluation_suggestions(error, recipe, world, on_device=on_device))
        last = _NO_SUGGESTION_FOR_EVALUATION
    else:
        suggestions = list(_suggestions(error, recipe, world, phase, on_device=on_device))
        last = _NO_SUGGESTION
    change = f"try {', then '.join(suggestions[:_MAX_SUGGESTIONS])}" if suggestions else last
    return f"{owner} ran out of memory{during}: {_requested(error)}; {change}"


def _is_of_device(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = ("CUDA", "CUBLAS", "NCCL", "CUDNN")
    return isinstance(error, RuntimeError) and any(word in str(error).upper() for word in words)


def _phase(error: BaseException) -> str | None:
    if "DataLoader worker" in str(error):
        return "data"
    modules = [_module(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = (
        phase
        for phase, parts in _PHASES.items()
        if any(f"{module}.".startswith(part) for module in modules for part in parts)
    )
    return next(found, None)


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


def _requested(error: BaseException) -> str:
    """Return the amount of memory that was requested, or the error itself if it does not contain
    the amount.
    """
    text = str(error)
    if found := re.search(r"tried to allocate (\d+) bytes", text):
        return f"an allocation of {_readable_size(int(found[1]))} failed"
    if found := re.search(r"(?:Tried|Unable) to allocate ([\d.]+ \w+)", text):
        total = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
        left = f" with {total[2]} of {total[1]} free" if total else ""
        return f"an allocation of {found[1]} failed{left}"
    return text.splitlines()[0] if text else type(error).__name__


def _readable_size(size: int) -> str:
    """Return a size as text, such as `3.5 GiB`."""
    power = min(6, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB')[power]}"


def _suggestions(
    error: BaseException, recipe: Recipe, world: World, phase: str | None, *, on_device: bool
) -> Iterator[str]:
    if on_device and (settings := _fragmented(error)):
        yield settings
    keys = list(_ORDER[phase or "forward"])
    if not on_device:
        # Data loader workers use host memory. On CPUs, the model also uses host memory, so
        # suggestions about the model come first. With an accelerator, the workers are the more
        # likely cause.
        keys = (
            [*keys, "workers", "background"] if world.device.type == "cpu" else ["workers", *keys]
        )
    available = _available(recipe, world)
    for key in dict.fromkeys(keys):
        if key in available:
            yield available[key]


def _evaluation_suggestions(
    error: BaseException, recipe: Recipe, world: World, *, on_device: bool
) -> Iterator[str]:
    """Yield options of `kway eval` that need less memory."""
    if on_device and (settings := _fragmented(error)):
        yield settings
    available = _available(recipe, world)
    keys = ("evaluation", "workers") if world.device.type == "cpu" else ("workers", "evaluation")
    for key in ("evaluation",) if on_device else keys:
        if key in available:
            yield f"--set {available[key]}"
    # Each process has its own device, but the processes on a host share the host memory.
    if on_device:
        yield f"--nproc {2 * world.size}"
    elif world.size > 1:
        yield f"--nproc {world.size // 2}"


def _available(recipe: Recipe, world: World) -> dict[str, str]:
    """Return the changes that this recipe does not already contain, as `key=value`."""
    train = recipe.train
    rows = train.global_batch // world.size
    found = {
        "micro": f"train.micro_batches={2 * train.micro_batches}"
        if 2 * train.micro_batches <= rows
        else None,
        "precision": "train.precision=bf16" if train.precision == "fp32" else None,
        "recompute": None
        if train.activation_checkpointing
        else "train.activation_checkpointing=true",
        "strategy": _sharding(recipe) if world.size > 1 else None,
        "groups": _larger_groups(recipe, world),
        "head": _smaller_blocks(recipe, world),
        "rows": "head.dtype=bf16" if recipe.can_have_bf16_rows else None,
        "ema": "train.ema=null" if train.ema is not None else None,
        "evaluation": f"evaluation.batch={recipe.evaluation.batch // 2}"
        if recipe.evaluation.batch > 1
        else None,
        "background": "checkpoint.in_background=false" if recipe.checkpoint.in_background else None,
        "workers": f"data.workers={recipe.data.workers // 2}" if recipe.data.workers else None,
    }
    return {key: change for key, change in found.items() if change is not None}


def _smaller_blocks(recipe: Recipe, world: World) -> str | None:
    """Return the change that halves the memory for logits on this rank's device."""
    limit = recipe.head.memory_mib or Processor.of(world.device).default_memory_mib
    return f"head.memory_mib={limit // 2}" if limit > 1 else None


def _sharding(recipe: Recipe) -> str | None:
    """Return the change that selects the next strategy with lower memory use per rank."""
    strategy = recipe.train.strategy
    smaller = strategy.smaller(whole_tensors=recipe.optimizer.needs_whole_tensors)
    return None if smaller is None else strategy.change_to(smaller)


def _larger_groups(recipe: Recipe, world: World) -> str | None:
    """Return the change that shards the classes over all ranks, so that each rank has fewer of
    them.
    """
    group = recipe.train.class_group
    ranks = {"world": world.size, "node": world.local_size}.get(str(group), group)
    return "train.class_group=world" if ranks != world.size else None


def _fragmented(error: BaseException) -> str | None:
    """Return the setting to change if torch has reserved enough memory, but in fragments that are
    too small.
    """
    found = re.search(r"([\d.]+) (\w+) is reserved by PyTorch but unallocated", str(error))
    requested = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    if not found or not requested or _bytes(found) < _bytes(requested):
        return None
    return "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True"


def _bytes(found: "re.Match[str]") -> float:
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    return float(found[1]) * 1024 ** units.index(found[2])
