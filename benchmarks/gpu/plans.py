"""The plans of the measured steps, as computed by `kway plan`."""

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.sizes import RowsSize, Size, TaskSize
from benchmarks.gpu.tasks import IMAGES, TEXTS, recipe_of
from launch.plan.cluster import Machine, machine_named
from launch.plan.plan import Plan, PlanRequest
from trainer.config import Recipe
from trainer.devices import DEVICES

_ASSUMED = "CUDA and NCCL (assumed)"


def plans(size: Size, device: torch.device) -> dict[str, Any]:
    """Plan all steps on this device, at the rates of its data sheet."""
    return plans_on(machine_of(device), size)


def plans_on(machine: Machine, size: Size) -> dict[str, Any]:
    """Plan the steps of `size` on a machine."""
    images, texts = recipe_of(IMAGES, size.images, {}), recipe_of(TEXTS, size.texts, {})
    return {
        "machine": machine.name,
        "images": planned(images, size.images.classes, machine),
        "texts": planned(texts, size.texts.classes, machine),
        "heads": [
            {
                "classes": classes,
                "rows": rows,
                **planned_head(size.head_dim, classes, rows, machine),
            }
            for classes in size.head_classes
            for rows in size.head_rows
        ],
    }


def planned(recipe: Recipe, classes: int, machine: Machine) -> dict[str, Any]:
    """Return the lower bound of the step's seconds, and its bytes without the CUDA context."""
    plan = Plan(recipe, PlanRequest(machine, nodes=1, gpus=1, classes=classes))
    assumed, *_ = plan.memory.lines.get(_ASSUMED, (0,))
    return {
        "seconds": plan.seconds,
        "phases": {phase.phase: phase.seconds for phase in plan.phases},
        "memory_bytes": plan.memory.peak - assumed,
        "flops_per_sample": plan.flops / recipe.train.global_batch,
    }


def planned_head(
    dim: int, classes: int, rows: int, machine: Machine, **changes: dict[str, Any]
) -> dict[str, Any]:
    """Return the seconds of the head in a plan, and its bytes without weights and moments.
    `changes` are sections of the recipe."""
    encoder = {
        "model_type": "bert",
        "vocab_size": 10,
        "hidden_size": dim,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
    }
    shape = TaskSize(encoder, classes=classes, batch=rows, tokens=1)
    recipe = recipe_of(TEXTS, shape, {"head": {"bias": False}} | changes)
    plan = Plan(recipe, PlanRequest(machine, nodes=1, gpus=1, classes=classes))
    (phase,) = [each for each in plan.phases if each.phase == "head"]
    parts = {
        what: sizes[0]
        for what, sizes in plan.memory.lines.items()
        if what.startswith(("head ", "features"))
    }
    return {
        "seconds": phase.seconds,
        "compute_seconds": phase.compute,
        "memory_seconds": phase.memory,
        "blocks": plan.head.blocks,
        "memory_bytes": sum(parts.values()) - parts["head weights"],
        "weight_bytes": parts["head weights"],
        "index_bytes": plan.head.class_index,
    }


def planned_rows(case: RowsSize, machine: Machine) -> dict[str, Any]:
    """Return the plan of a head whose rows FusedSGD updates, with tiles."""
    head = {"bias": False, "dtype": case.dtype, "tiles": True, "memory_mib": case.memory_mib}
    optimizer = {"kind": "sgd", "momentum": 0, "head": {"fused_sgd": "in_backward"}}
    return planned_head(case.dim, case.classes, case.batch, machine, head=head, optimizer=optimizer)


def machine_of(device: torch.device) -> Machine:
    """Return the machine of `kway plan` for a device."""
    name = "cpu"
    if device.type == "cuda":
        found = torch.cuda.get_device_name(device)
        names = [key for key, each in DEVICES.items() if found in each.names]
        if not names:
            raise ValueError(f"{found} is not in trainer/devices.py: add its rates there")
        name = names[0]
    return machine_named(name, link_gbps=None, ranks_per_node=1)


def measured_h100() -> Machine:
    """Return an H100 with the rates that were measured on one with torch: the copy of a large
    tensor, counting bytes read and written, and a bf16 product of 8192 x 8192 matrices."""
    machine = machine_named("h100", link_gbps=None, ranks_per_node=1)
    return replace(machine, bandwidth=3.0e12, flops={**machine.flops, "bf16": 798e12})
