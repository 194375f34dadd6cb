"""The operations, launches and waits of a plan, compared with those of real steps."""

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from heads import ClassHead, build_head
from launch.plan.cluster import Machine
from launch.plan.operation_timer import OperationTimer
from launch.plan.operations import Operation, OperationRecorder, Operations
from launch.plan.plan import Plan, PlanRequest, make_plan
from launch.plan.table import as_json, show
from launch.plan.trial_step import RecordedPhases, tree_like
from tests.launch.measured_step import random_batch
from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.steps.take import take_step
from trainer.task import build_task
from trainer.world import World

RATES = {"fp32": 1e13, "bf16": 1e14}
GPU = Machine("gpu", "cuda", 1 << 36, 1e12, RATES, 1e11, 1e10)
CPU = Machine("cpu", "cpu", 1 << 36, 1e10, RATES, 1e11, 1e10, launch_seconds=0, wait_seconds=0)
BATCH, CLASSES, BLOCK = 64, 5000, 512  # with 1 MiB of memory, a block has 512 classes


def recipe_of(folder: Path, head: dict[str, Any], **keys: Any) -> Recipe:
    head = {"memory_mib": 1} | head
    return glyph_recipe(folder, folder / "run", head=head, train__global_batch=BATCH, **keys)


def number(operations: Operations, what: str) -> int:
    return sum(getattr(each, what) * times for each, times in operations.items())


def recorded_step(recipe: Recipe, num_classes: int) -> dict[str, Operations]:
    """Return the operations by phase of a real step on this CPU."""
    recorder = OperationRecorder()
    phases = RecordedPhases(recorder)
    cpu = torch.device("cpu")
    task = build_task(
        recipe,
        class_names=[str(i) for i in range(num_classes)],
        label_vectors=None,
        world=World(0, 1, 0, 1, cpu, None),
        class_counts=np.ones(num_classes),
        phases=phases,
    )
    task.train().start_training()
    batch = random_batch(recipe, num_classes, BATCH)
    with recorder:
        take_step(task, batch, 1.0, step=1)
        phases.clear()
        take_step(task, batch, 1.0, step=2)
    return phases.operations


HEADS: dict[str, dict[str, Any]] = {
    "ce": {},
    "batch_ce": {"loss": {"kind": "batch_ce"}},
    "bce": {"loss": {"kind": "bce"}},
    "softmax_cs": {"loss": {"kind": "softmax_cs"}},
    "arcface": {"logits": {"kind": "arcface", "learn_scale": True}},
    "cosine, quadratic": {"logits": {"kind": "cosine"}, "loss": {"kind": "quadratic"}},
    "nce, balanced": {"loss": {"kind": "nce"}, "class_weights": "balanced"},
    "every graph is saved": {"memory_mib": 256},
}


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_the_planned_operations_of_head_and_update_are_those_of_a_real_step(
    tmp_path: Path, name: str, synchronous: bool
):
    recipe = recipe_of(tmp_path, HEADS[name], train__synchronous=synchronous)
    plan = make_plan(recipe, PlanRequest(CPU, 1, 1, CLASSES))
    real = recorded_step(recipe, CLASSES)
    for phase in ("head", "optimizer", "step"):
        planned = plan.operations.phases[phase]
        for what in ("launches", "flops"):
            assert number(planned, what) == number(real[phase], what), (phase, what)
    assert plan.head.blocks == (1 if "graph" in name else math.ceil(CLASSES / BLOCK))


def test_the_planned_launches_of_the_backbone_are_those_of_a_real_step(tmp_path: Path):
    recipe = recipe_of(tmp_path, {})
    real = recorded_step(recipe, 100)
    time = make_plan(recipe, PlanRequest(CPU, 1, 1, 100)).time
    for phase in time.phases:
        assert phase.launches == number(real[phase.phase], "launches")


@pytest.mark.parametrize("kind", ["dense", "utree", "vtree"])
def test_the_planned_launches_of_a_class_block_are_those_of_the_engine(tmp_path: Path, kind: str):
    recipe = recipe_of(tmp_path, {"weights": {"kind": kind}})
    plan = make_plan(recipe, PlanRequest(GPU, 1, 1, 20 * BLOCK))
    counts = []
    for num_classes in (10 * BLOCK, 11 * BLOCK):
        tree = None if kind == "dense" else tree_like(plan.classes, num_classes)
        head = build_head(
            recipe.head,
            dim=plan.backbone.dim,
            num_classes=num_classes,
            label_vectors=None,
            mesh=None,
            seed=0,
            device="cpu",
            tree=tree,
        )
        counts.append(launches_of(head))
    assert plan.operations.block_launches == counts[1] - counts[0] > 20


def launches_of(head: ClassHead) -> int:
    features = torch.randn(BATCH, head.dim, requires_grad=True)
    labels = torch.arange(BATCH)
    with OperationRecorder() as recorder:
        head.train()(features, labels).backward()
    return number(recorder.operations, "launches")


WAITING: dict[str, tuple[dict[str, Any], int]] = {
    "deferred": ({}, 0),
    "synchronous": ({"train__synchronous": True}, 5),  # labels, exchange, NaN, loss, norm
    "deepspeed": (
        {"train__strategy": {"kind": "deepspeed"}, "optimizer": {"kind": "adamw"}},
        5,
    ),
    "sampled": ({"head": {"loss": {"kind": "ce", "sample_rate": 0.1}}}, 2),
    "topk_hinge": ({"head": {"loss": {"kind": "topk_hinge"}}}, 0),
    "factored": (
        {"head": {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}, "bias": False}},
        2,  # loss and norm; the waits of the factored head itself are not counted
    ),
    "micro-batches": ({"train__micro_batches": 2}, 0),
    "mixed, clipped, averaged": (
        {
            "data__augment__mix": {"mixup_alpha": 0.2},
            "train__clip_norm": 1.0,
            "train__ema": {},
        },
        0,
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_plan_counts_how_often_the_host_waits(tmp_path: Path, name: str):
    keys, waits = WAITING[name]
    recipe = glyph_recipe(tmp_path, tmp_path / "run", train__precision="bf16", **keys)
    plan = make_plan(recipe, PlanRequest(GPU, 1, 2, 1000))
    assert plan.time.waits == waits
    assert plan.operations.defers is (name not in ("synchronous", "deepspeed", "factored"))


@pytest.mark.parametrize("kind", ["simloss", "smooth_topk", "hierarchical_softmax"])
def test_losses_with_their_own_constants_can_be_planned(tmp_path: Path, kind: str):
    head: dict[str, Any] = {"loss": {"kind": kind}}
    if kind == "hierarchical_softmax":
        head["weights"] = {"kind": "vtree"}
    plan = make_plan(recipe_of(tmp_path, head), PlanRequest(GPU, 1, 2, CLASSES))
    assert plan.operations.block_launches > 30


def large_plan(folder: Path, memory_mib: int) -> Plan:
    recipe = recipe_of(folder, {"memory_mib": memory_mib}, train__precision="bf16")
    return make_plan(recipe, PlanRequest(GPU, 64, 8, 10**8))


def test_a_plan_of_512_gpus_shows_its_blocks_and_what_reduces_its_launches(tmp_path: Path):
    small, large = large_plan(tmp_path, 1), large_plan(tmp_path, 64)
    assert small.head.blocks == math.ceil(10**8 / 512 / BLOCK)
    assert small.head.blocks > 50 * large.head.blocks
    assert small.time.launches > 10 * large.time.launches
    head = next(phase for phase in small.time.phases if phase.phase == "head")
    assert head.bound == "launches"
    assert head.seconds == pytest.approx(head.launches * GPU.launch_seconds)
    console = Console(width=80, record=True, file=io.StringIO())
    show(small, [], [], console)
    shown = " ".join(console.export_text().split())
    assert f"{small.head.blocks} class blocks" in shown
    assert "raise head.memory_mib above 1 for fewer blocks" in shown
    assert "the host never waits for the device" in shown
    numbers = as_json(small, [], [])["time"]
    assert numbers["launches"] == small.time.launches
    assert numbers["launches_per_class_block"] == small.operations.block_launches


def test_only_operations_with_a_kernel_are_launches():
    rows = torch.zeros(8, 4)
    with OperationRecorder() as recorder:
        torch.empty_like(rows).reshape(4, 8).t().detach()[1:]
        assert rows.is_cpu
    assert not recorder.operations
    with recorder:
        torch.mm(rows, rows.t())
    assert recorder.operations.total() == 1
    assert number(recorder.operations, "flops") == 2 * 8 * 4 * 8
    assert number(recorder.operations, "bytes") == 4 * (2 * 8 * 4 + 8 * 8)


def test_a_lookup_moves_only_the_bytes_of_its_rows():
    table, index = torch.zeros(1000, 4), torch.arange(3)
    with OperationRecorder() as recorder:
        table[index]
    assert number(recorder.operations, "bytes") == 2 * 3 * 4 * 4 + 3 * 8


def test_a_timer_repeats_operations_with_their_shapes():
    operations: Operations = Counter()
    for size in (8, 512):
        with OperationRecorder() as recorder:
            torch.mm(torch.ones(size, size), torch.ones(1, size).expand(size, size))
        operations |= recorder.operations
    timer = OperationTimer(threads=1)
    products = [each for each in operations if each.flops]
    short, long = (timer.seconds(each, step_bytes=0, otherwise=math.nan) for each in products)
    assert 0 < short < long
    assert timer.seconds(Operation(), step_bytes=0, otherwise=3.0) == 3.0
