"""`kway plan` compared with small runs: bytes per collective, and persistent and peak memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.plan.cluster import Machine
from launch.plan.plan import Plan, PlanRequest, make_plan
from tests.launch.measured_step import measure_steps
from tests.ranks import run_on_ranks
from tests.shards import glyph_recipe, text_recipe
from trainer.config import Recipe

CPU = Machine("cpu", "cpu", 1 << 33, 1e10, {"fp32": 1e11}, 1e9, 1e9)
ADAMW = {"kind": "adamw"}
FSDP = {"kind": "fsdp"}
FSDP_NO_RESHARD = {"kind": "fsdp", "reshard_after_forward": False}
NUM_CLASSES = 5000
BASE = {"train__global_batch": 64}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"optimizer": ADAMW},
    "ddp, unsharded classes": {"train__class_group": 1},
    "ddp, vtree": {"head": {"weights": {"kind": "vtree"}}, "optimizer": ADAMW},
    "ddp, micro-batches": {"train__micro_batches": 2, "train__ema": {}},
    "ddp, smooth_topk": {"head": {"loss": {"kind": "smooth_topk"}}},
    "factored": {
        "head": {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}, "bias": False}
    },
    "fsdp, texts": {"train__strategy": FSDP, "optimizer": {"kind": "lamb"}, "text": True},
    "fsdp": {"train__strategy": FSDP, "optimizer": ADAMW},
    "fsdp, micro-batches": {"train__strategy": FSDP, "train__micro_batches": 2},
    "fsdp, bf16 weights": {
        "train__strategy": {"kind": "fsdp", "param_dtype": "bf16"},
        "train__precision": "bf16",
        "text": True,
    },
    "fsdp, bf16 gradients": {"train__strategy": {"kind": "fsdp", "reduce_dtype": "bf16"}},
}
MORE_CASES: dict[str, dict[str, Any]] = {
    "ddp, vtree, unsharded": {"head": {"weights": {"kind": "vtree"}}, "train__class_group": 1},
    "ddp, batch_ce, micro-batches": {
        "train__micro_batches": 2,
        "head": {"loss": {"kind": "batch_ce"}},
    },
    "ddp, bf16": {"train__precision": "bf16"},
    "ddp, checkpointing": {"train__activation_checkpointing": True},
    "ddp, little memory": {"head": {"memory_mib": 1}},
    "ddp, lamb": {"optimizer": {"kind": "lamb"}},
    "ddp, arcface": {"head": {"logits": {"kind": "arcface", "learn_scale": True}}},
    "ddp, large images": {"data__image__size": 64, "train__clip_norm": 1.0},
    "ddp, local batch norm": {"backbone__batch_norm": "local"},
    "ddp, mixed": {"data__augment__mix": {"mixup_alpha": 0.2}},
    "ddp, texts": {"optimizer": ADAMW, "text": True},
    "fsdp, no reshard": {"train__strategy": FSDP_NO_RESHARD, "train__class_group": 1},
}
# Two copies of the backbone, each sharded over two ranks.
COPIES: dict[str, dict[str, Any]] = {
    "fsdp, two copies": {
        "train__strategy": {"kind": "fsdp", "shard_group": 2},
        "train__class_group": 2,
        "train__micro_batches": 2,
        "optimizer": ADAMW,
    }
}
ZERO_CASES: dict[str, dict[str, Any]] = {
    f"zero {stage}{', micro-batches' if parts > 1 else ''}": {
        "train__strategy": {"kind": "deepspeed", "stage": stage},
        "train__micro_batches": parts,
        "optimizer": ADAMW,
    }
    for stage in (0, 1, 2, 3)
    for parts in ((1, 2) if stage == 2 else (1,))
}


def recipe_of(case: dict[str, Any], folder: Path) -> Recipe:
    make = text_recipe if "text" in case else glyph_recipe
    keys = {key: value for key, value in case.items() if key != "text"}
    return make(folder, folder / "run", **(BASE | keys))


def class_ranks(recipe: Recipe) -> int:
    return 1 if recipe.train.class_group == 1 else 2


def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(NUM_CLASSES, 4)).astype(np.float32)


def by_kind(sizes: Iterable[tuple[str, str, int]], recipe: Recipe) -> dict[str, int]:
    """Sum the bytes of (kind, group, bytes) by kind. Skip groups of a single rank."""
    trivial = "data" if class_ranks(recipe) == 2 else "class"
    sums: dict[str, int] = {}
    for kind, group, size in sizes:
        if group != trivial:
            sums[kind] = sums.get(kind, 0) + size
    return sums


def differences(
    recipe: Recipe, measured: dict[str, Any], *, ranks: int
) -> dict[str, tuple[float, float]]:
    """Return (planned, measured) by name for every measured quantity."""
    request = PlanRequest(CPU, 1, ranks, classes=NUM_CLASSES)
    plan = make_plan(recipe, request, label_vectors=vectors())
    planned = by_kind([(c.operation, c.group, c.total) for c in plan.collectives], recipe)
    recorded = by_kind(measured["collectives"], recipe)
    persistent = measured["persistent"]
    found: dict[str, tuple[float, float]] = {
        kind: (planned.get(kind, 0), recorded.get(kind, 0))
        for kind in planned.keys() | recorded.keys()
    }
    return found | {
        "head": (line(plan, "head weights"), persistent["head"]),
        "moments": (line(plan, "optimizer moments"), persistent["moments"]),
        "averages": (line(plan, "moving averages"), persistent["averages"]),
        "peak of a step": (plan.memory.peak - plan.memory.lasting, measured["peak"]),
    }


def line(plan: Plan, what: str) -> int:
    return sum(each.head for each in plan.memory.lines if each.what == what)


def assert_close(cases: dict[str, dict[str, Any]], folder: Path, *, ranks: int = 2) -> None:
    recipes = {name: recipe_of(case, folder) for name, case in cases.items()}
    work = [(recipe, class_ranks(recipe), NUM_CLASSES, vectors()) for recipe in recipes.values()]
    measured = run_on_ranks(ranks, measure_steps, work)[0]
    wrong = []
    for (name, recipe), own in zip(recipes.items(), measured, strict=True):
        for what, (planned, real) in differences(recipe, own, ranks=ranks).items():
            if abs(planned - real) > 0.1 * real:
                wrong.append(f"{name}: {what}: {planned} planned, {real} measured")
    assert not wrong, "\n".join(wrong)


def test_measured_traffic_and_memory_are_within_10_percent_of_the_plan(tmp_path: Path):
    assert_close(CASES, tmp_path)


def test_measured_traffic_and_memory_of_two_copies_are_within_10_percent_of_the_plan(
    tmp_path: Path,
):
    assert_close(COPIES, tmp_path, ranks=4)


@pytest.mark.slow
def test_measured_traffic_and_memory_of_more_recipes_are_within_10_percent_of_the_plan(
    tmp_path: Path,
):
    assert_close(MORE_CASES, tmp_path)


def test_measured_traffic_and_memory_of_deepspeed_are_within_10_percent_of_the_plan(tmp_path: Path):
    assert_close(ZERO_CASES, tmp_path)
