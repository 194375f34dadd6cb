"""Compares losses with float64 definitions on the CPU, and checks collectives, and checkpoints that
are resumed on another device."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.measuring import world_of_one_rank
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.tasks import IMAGES, random_batch, task_of
from heads import ClassHead, optional_triton
from heads.collectives import (
    all_gather_equal,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    axis_group,
    broadcast,
    reduce_scatter_rows,
)
from heads.losses import LOSSES
from tests.heads.cases import (
    LOGIT_MAPS,
    LOSS_KINDS,
    WEIGHTINGS,
    gradient_of_nodes,
    label_tree,
    make_loss,
    problem,
    set_nodes,
)
from tests.heads.test_logits import DIM, ROWS, counts_of, expected
from trainer.checkpoints import find_checkpoint, save_checkpoint
from trainer.checkpoints.entries import (
    create_moments,
    load_entries,
    restore_training,
    training_entries,
)
from trainer.step import read_numbers, take_step
from trainer.task import Task
from trainer.world import World

_CLASSES = 13
_PRECISIONS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.float32,
    "float32, tiles": torch.float32,
    "bf16, tiles": torch.float32,
}
# With rounded logits, another class may have the largest logit and receive the whole gradient.
_LARGEST = ("max_margin", "batch_max_margin", "topk_hinge")
# The largest accepted relative error. Features and class weights are rounded to bf16, which has a
# relative precision of 2^-8, and margins amplify the error.
LIMITS = {
    "float64": 1e-9,
    "float32": 1e-3,
    "bf16": 0.3,
    "float32, tiles": 1e-3,
    "bf16, tiles": 0.3,
}
_NUM_WORST = 12


def losses(size: Size, device: torch.device) -> dict[str, Any]:
    """Compare the loss and all gradients with their definitions in float64.

    The error of a case is the largest relative error, in the Euclidean norm, of the loss and of the
    gradients with respect to features, nodes and scalars.
    """
    cases = [
        _case(*case, device)
        for case in product(_PRECISIONS, LOGIT_MAPS, size.losses or LOSS_KINDS, WEIGHTINGS)
        if not _uses_tiles(case[0]) or (_runs_kernels(device) and LOSSES[case[2]].tile is not None)
    ]
    of_precision = {
        name: found
        for name in _PRECISIONS
        if (found := [case for case in cases if case["precision"] == name])
    }
    worst = {
        name: sorted(found, key=lambda case: -case["error"])[:_NUM_WORST]
        for name, found in of_precision.items()
    }
    for found in worst.values():
        for case in found[:3]:
            print("worst:", case)
    return {
        "num_cases": len(cases),
        "limits": LIMITS,
        "wrong": [case for case in cases if not case["is_right"]],
        "median": {
            name: float(np.median([case["error"] for case in found]))
            for name, found in of_precision.items()
        },
        "worst": worst,
    }


def _runs_kernels(device: torch.device) -> bool:
    is_gpu = device.type == "cuda"
    return optional_triton.interprets or (is_gpu and optional_triton.is_installed)


def _uses_tiles(precision: str) -> bool:
    return precision.endswith("tiles")


def _case(
    precision: str, logits: str, kind: str, weighting: str, device: torch.device
) -> dict[str, Any]:
    tree = label_tree(weighting, _CLASSES)
    found = _step(_head(logits, kind, weighting, precision, device), precision)
    wanted = expected(logits, kind, tree)
    by_row = np.linalg.norm(found[1] - wanted[1], axis=1)
    error = max(_relative_errors(found, wanted))
    excused = precision.startswith("bf16") and kind in _LARGEST
    return {
        "precision": precision,
        "logits": logits,
        "loss": kind,
        "weights": weighting,
        "error": error,
        "worst_row": int(by_row.argmax()),
        "is_right": bool(np.isfinite(error) and (excused or error <= LIMITS[precision])),
    }


def _head(
    logits: str, kind: str, weighting: str, precision: str, device: torch.device, mesh: Any = None
) -> ClassHead:
    tree = label_tree(weighting, _CLASSES)
    head = ClassHead(
        DIM,
        tree,
        make_loss(kind, _CLASSES),
        logits=LOGIT_MAPS[logits],
        class_counts=counts_of(_CLASSES),
        mesh=mesh,
        device=device,
        dtype=_PRECISIONS[precision],
        tiles=_uses_tiles(precision),
    )
    set_nodes(head, problem(tree, ROWS, DIM)[2])
    return head


def _step(head: ClassHead, precision: str) -> list[np.ndarray]:
    """Return the loss and its gradients in float64 on the CPU, in the order of `expected`."""
    device = head.weight.device
    features, labels, _ = problem(head.tree, ROWS, DIM)
    mine = features.to(device, head.weight.dtype).requires_grad_()
    bf16 = (
        torch.autocast(device.type, torch.bfloat16)
        if precision.startswith("bf16")
        else nullcontext()
    )
    with bf16:
        loss = head(mine, labels.to(device))
    loss.backward()
    assert mine.grad is not None
    found = [loss.detach(), mine.grad, gradient_of_nodes(head)]
    if head.log_scale is not None and head.offset is not None:
        assert head.log_scale.grad is not None
        assert head.offset.grad is not None
        found += [head.log_scale.grad, head.offset.grad]
    return [each.double().cpu().numpy() for each in found]


def _relative_errors(found: list[np.ndarray], wanted: list[np.ndarray]) -> Iterator[float]:
    """Yield the errors of the loss and of the gradients. The gradients of the scalars are compared
    as one vector, because that of the offset can be 0."""
    for ours, theirs in zip(_with_joined_scalars(found), _with_joined_scalars(wanted), strict=True):
        norm = max(float(np.linalg.norm(theirs)), 1e-12)
        yield float(np.linalg.norm(ours - theirs)) / norm


def _with_joined_scalars(step: list[np.ndarray]) -> list[np.ndarray]:
    return [*step[:3], np.stack(step[3:])] if step[3:] else step


# ------------------------------------------------------------------------ collectives


def collectives(size: Size, device: torch.device) -> dict[str, Any]:
    """Call every collective in groups of one rank: alone, in the head, and under ddp and fsdp.

    In such a group, every collective must return its input, so a sharded head and a distributed
    backbone must give the same results as without process groups.
    """
    found: dict[str, Any] = {"backend": "nccl" if device.type == "cuda" else "gloo"}
    want = _trained(size, device, {})
    with world_of_one_rank(device) as world:
        found["wrong"] = [*_wrong_collectives(world), *_wrong_heads(world, size)]
        for kind in ("ddp", "fsdp"):
            changes = {"train": {"strategy": {"kind": kind}}}
            got = _trained(size, device, changes, world)
            if not np.allclose(got, want, rtol=1e-3, atol=1e-5):
                found["wrong"].append(f"losses under {kind}: {got}, but {want} without groups")
        found["version"] = ".".join(map(str, torch.cuda.nccl.version())) if _has_nccl() else None
    return found


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _wrong_collectives(world: World) -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        mine = torch.arange(12, device=world.device).view(4, 3).to(dtype)
        group = axis_group(world.mesh, "class")
        results: dict[str, Tensor] = {
            "all_reduce_sum": all_reduce_sum(mine.clone(), group),
            "all_reduce_max": all_reduce_max(mine.clone(), group),
            "broadcast": broadcast(mine.clone(), group),
            "all_gather_equal": all_gather_equal(mine, group)[0],
            "all_gather_rows": all_gather_rows(mine, [4], group),
            "reduce_scatter_rows": reduce_scatter_rows(mine, [4], group),
        }
        yield from (
            f"{name} of {dtype}: {result.tolist()}"
            for name, result in results.items()
            if not torch.equal(result, mine)
        )


def _wrong_heads(world: World, size: Size) -> Iterator[str]:
    for kind, weighting in product(size.losses or LOSS_KINDS, WEIGHTINGS):
        head = _head("dot", kind, weighting, "float64", world.device, world.mesh)
        errors = _relative_errors(_step(head, "float64"), expected("dot", kind, head.tree))
        if (error := max(errors)) > LIMITS["float64"]:
            yield f"{kind} over {weighting}: relative error {error}"


def _trained(
    size: Size, device: torch.device, changes: dict[str, Any], world: World | None = None
) -> list[float]:
    """Return the losses of three steps in float32."""
    task = task_of(IMAGES, size.tiny, device, changes, world, precision="fp32")
    found = _losses(task, 3)
    task.close()
    return found


def _losses(task: Task, num_steps: int, *, first: int = 1) -> list[float]:
    batch = random_batch(task.recipe, task.head.num_classes, task.world.device)
    # Otherwise, convolutions use TensorFloat-32.
    with torch.backends.cudnn.flags(allow_tf32=False):
        return [
            read_numbers(task, take_step(task, batch, 1.0, step=step)).loss
            for step in range(first, first + num_steps)
        ]


# ------------------------------------------------------------------------ checkpoints


def checkpoint(size: Size, device: torch.device) -> dict[str, Any]:
    """Train for two steps, save, resume on the other device and train for two more steps, once from
    the CPU to the device and once from the device to the CPU. Compare the losses with those of an
    uninterrupted run on the CPU."""
    cpu = torch.device("cpu")
    want = _losses(task_of(IMAGES, size.tiny, cpu, {}, precision="fp32"), 4)
    found: dict[str, Any] = {"uninterrupted on the CPU": want}
    for start, end in ((cpu, device), (device, cpu)):
        found[f"{start.type} to {end.type}"] = _moved(size, start, end)
    wrong = [name for name, got in found.items() if not np.allclose(got, want, rtol=1e-3)]
    return {"losses": found, "wrong": wrong}


def _moved(size: Size, start: torch.device, end: torch.device) -> list[float]:
    with TemporaryDirectory() as folder:
        task = task_of(IMAGES, size.tiny, start, {}, precision="fp32")
        losses = _losses(task, 2)
        save_checkpoint(Path(folder), training_entries(task), {"step": 2}, task.world, keep=1)
        resumed = task_of(IMAGES, size.tiny, end, {}, precision="fp32", seed=1)
        saved, _ = find_checkpoint(Path(folder), resumed.world)
        assert saved is not None
        create_moments(resumed)
        entries = training_entries(resumed)
        load_entries(saved, entries, resumed.world)
        restore_training(resumed, entries)
    return [*losses, *_losses(resumed, 2, first=3)]
