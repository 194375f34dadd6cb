"""Detects out-of-memory errors and suggests changes to the recipe.

The phase is determined from the traceback. Suggestions exclude settings that the recipe already
has.
"""

import errno
import traceback
from collections.abc import Iterator

import torch

from data.messages import one_line
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
# The modules in the traceback that indicate a phase. The first phase with a match is used.
_PHASES = {
    "evaluation": ("trainer.evaluation.",),
    "checkpoint": ("trainer.checkpoints.", "torch.distributed.checkpoint."),
    "data": ("data.",),
    "head": ("heads.",),
    "optimizer": ("trainer.optimizers.", "trainer.ema.", "torch.optim.", "deepspeed.ops."),
}
_MAX_SUGGESTIONS = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of CUDA, torch, numpy, Python or Linux means that the device or the
    host is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def advice(error: BaseException, recipe: Recipe, world: World, *, evaluating: bool = False) -> str:
    """Return one line with the phase, the error, and the changes to try in this recipe.

    If `evaluating` is true, suggest options of `kway eval` instead.
    """
    text, on_cuda = str(error), world.device.type != "cpu"
    phase = "data" if "DataLoader worker" in text else _phase(error)
    on_device = on_cuda and (
        isinstance(error, torch.OutOfMemoryError)
        or any(word in text.upper() for word in ("CUDA", "CUBLAS", "NCCL", "CUDNN"))
    )
    uses = {"batches" if evaluating else phase}
    if not on_device:
        # Data loader workers and copies for checkpoints use host memory. On CPUs, the model does,
        # too; on other devices, only while it is built.
        if on_cuda and not evaluating and phase != "building":
            uses = set()
        uses |= {"data"} if evaluating else {"data", "background"}
    found = [change for change, used in _changes(recipe, world) if uses & {*used.split()}]
    if evaluating:
        found = [f"--set {change}" for change in found]
        # Each process has its own device, but the processes on a host share the host memory.
        if on_device or world.size > 1:
            found.append(f"--nproc {2 * world.size if on_device else world.size // 2}")
    if found:
        fix = f"try {', then '.join(found[:_MAX_SUGGESTIONS])}"
    elif evaluating:
        fix = "the batches cannot be smaller: use a machine with more memory"
    else:
        fix = "no other recipe setting saves memory: use more ranks or a smaller backbone"
    owner = f"cuda device {world.device.index or 0}" if on_device else "the machine"
    return f"{owner} ran out of memory in {phase}: {one_line(error)}; {fix}"


def _phase(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [f"{frame.f_globals.get('__name__', '')}." for frame in frames]
    for module, frame in zip(modules, frames, strict=True):
        # The model itself is too large, so smaller batches would not help.
        if frame.f_code.co_name.startswith("build_") and module.startswith(("heads.", "trainer.")):
            return "building"
    found = (phase for phase, parts in _PHASES.items() if any(m.startswith(parts) for m in modules))
    return next(found, "step")


def _changes(recipe: Recipe, world: World) -> Iterator[tuple[str, str]]:
    """Yield each possible change `key=value` that saves memory, in the order of their cost, with
    the phases and other uses of memory that it makes smaller."""
    train, data = recipe.train, recipe.data
    if recipe.evaluation.batch > 1:
        yield f"evaluation.batch={recipe.evaluation.batch // 2}", "evaluation batches"
    memory_mib = recipe.head.memory_mib or Processor.of(world.device).default_memory_mib
    if memory_mib > 1:
        yield f"head.memory_mib={memory_mib // 2}", "head evaluation"
    if (parts := 2 * train.micro_batches) <= train.global_batch // world.size:
        yield f"train.micro_batches={parts}", "step head"
    if train.precision == "fp32":
        yield "train.precision=bf16", "step head evaluation"
    if not train.activation_checkpointing:
        yield "train.activation_checkpointing=true", "step"
    groups = {"world": world.size, "node": world.local_size}
    if groups.get(str(train.class_group), train.class_group) != world.size:
        # Each rank then has fewer classes.
        yield "train.class_group=world", "building step head optimizer evaluation checkpoint"
    if world.size > 1 and (smaller := train.strategy.smaller()) is not None:
        yield train.strategy.change_to(smaller), "building step optimizer evaluation checkpoint"
    if recipe.can_have_bf16_rows:
        yield "head.dtype=bf16", "building head optimizer"
    if train.ema is not None:
        yield "train.ema=null", "optimizer"
    if data.workers > 0:
        yield f"data.workers={data.workers // 2}", "data"
    if recipe.checkpoint.in_background:
        yield "checkpoint.in_background=false", "checkpoint background"
