"""The operations, launches and waits of a plan, compared with those of real steps."""

import io
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads import ClassHead, build_head
from launch.plan.cluster import Machine
from launch.plan.operation_timer import OperationTimer
from launch.plan.operations import Operation, OperationRecorder, Operations
from launch.plan.plan import Plan, PlanRequest, make_plan
from launch.plan.table import as_json, show
from launch.plan.trial_step import RecordedPhases, tree_like
from tests.launch.measured_step import random_batch
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.optimizers.adamw import AdamW
from trainer.step import take_step
from trainer.task import build_task

# Comparing the operations of plans one by one takes minutes.
pytestmark = pytest.mark.slow

RATES = {"fp32": 1e13, "bf16": 1e14}
GPU = Machine("gpu", "cuda", 1 << 36, 1e12, RATES, 1e11, 1e10)
CPU = Machine("cpu", "cpu", 1 << 36, 1e10, RATES, 1e11, 1e10, launch_seconds=0, wait_seconds=0)
BATCH, CLASSES, BLOCK = 64, 5000, 512  # with 1 MiB of memory, a block has 512 classes


def recipe_of(folder: Path, head: dict[str, Any], **keys: Any) -> Recipe:
    head = {"memory_mib": 1} | head
    return glyph_recipe(folder, folder / "run", head=head, train__global_batch=BATCH, **keys)


def number(operations: Operations, what: str) -> int:
    return sum(getattr(each, what) * times for each, times in operations.items())


def recorded_step(
    recipe: Recipe, num_classes: int, *, flagged: bool = False
) -> dict[str, Operations]:
    """Return the operations by phase of a real step on this CPU. `flagged`: see `Task`."""
    recorder = OperationRecorder()
    phases = RecordedPhases(recorder)
    world = rank_world()
    task = build_task(
        recipe,
        class_names=[str(i) for i in range(num_classes)],
        label_vectors=None,
        world=world,
        class_counts=np.ones(num_classes),
        phases=phases,
    )
    task.train().start_training()
    task.is_flagged |= flagged
    batch = random_batch(recipe, num_classes, BATCH // world.size)
    with recorder:
        take_step(task, batch, 1.0, step=1)
        phases.clear()
        take_step(task, batch, 1.0, step=2)
    return phases.operations


FACTORED = {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}, "bias": False}
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


@pytest.mark.parametrize(
    ("name", "synchronous"),
    [
        *((name, False) for name in HEADS),
        ("nce, balanced", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in HEADS if "nce" not in name),
    ],
)
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


def test_the_planned_launches_of_a_factored_head_are_those_of_a_real_step(tmp_path: Path):
    recipe = recipe_of(tmp_path, FACTORED, train__clip_norm=1e-3)
    real = recorded_step(recipe, CLASSES)
    plan = make_plan(recipe, PlanRequest(CPU, 1, 1, CLASSES))
    for phase in plan.time.phases:
        assert phase.launches == number(real[phase.phase], "launches"), phase.phase


FSDP = {"kind": "fsdp"}
ON_TWO_RANKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, micro-batches": {"train__micro_batches": 2},
    "ddp, factored": {"head": FACTORED},
    "ddp, local batch norm": {"backbone__batch_norm": "local"},
    "fsdp": {"train__strategy": FSDP},
    "fsdp, micro-batches": {"train__strategy": FSDP, "train__micro_batches": 2},
    "fsdp, no reshard": {"train__strategy": FSDP | {"reshard_after_forward": False}},
    "fsdp, bf16 gradients": {"train__strategy": FSDP | {"reduce_dtype": "bf16"}},
    "fsdp, bf16 weights": {
        "train__strategy": FSDP | {"param_dtype": "bf16"},
        "train__precision": "bf16",
        "train__micro_batches": 2,
    },
}
COPIES = FSDP | {"shard_group": 2}
ON_FOUR_RANKS: dict[str, dict[str, Any]] = {
    "two copies": {"train__strategy": COPIES},
    "two copies, micro-batches": {"train__strategy": COPIES, "train__micro_batches": 3},
    "two copies, bf16 weights": {
        "train__strategy": COPIES | {"param_dtype": "bf16"},
        "train__precision": "bf16",
        "train__micro_batches": 2,
    },
    "two copies, bf16 gradients": {
        "train__strategy": COPIES | {"reduce_dtype": "bf16"},
        "train__micro_batches": 2,
    },
}


def recorded_launches(recipes: list[Recipe]) -> list[dict[str, int]]:
    return [
        {phase: number(each, "launches") for phase, each in recorded_step(recipe, CLASSES).items()}
        for recipe in recipes
    ]


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO_RANKS), (4, ON_FOUR_RANKS)])
def test_the_planned_launches_of_several_ranks_are_those_of_a_real_step(
    tmp_path: Path, ranks: int, cases: dict[str, dict[str, Any]]
):
    recipes = [recipe_of(tmp_path, **({"head": {}} | keys)) for keys in cases.values()]
    measured = run_on_ranks(ranks, recorded_launches, recipes)[0]
    wrong = []
    for name, recipe, real in zip(cases, recipes, measured, strict=True):
        plan = make_plan(recipe, PlanRequest(CPU, 1, ranks, CLASSES))
        planned = {phase.phase: phase.launches for phase in plan.time.phases}
        for each in plan.collectives:
            if each.operation == "reduce_scatter":  # gloo copies its result
                planned[each.phase] += each.calls * each.messages
        if planned != real:
            wrong.append(f"{name}: {planned} planned, {real} measured")
    assert not wrong, "\n".join(wrong)


def test_plans_of_gpus_count_the_cuda_kernels_of_batch_norm_also_where_blocks_run_again(
    tmp_path: Path,
):
    recipe = recipe_of(tmp_path, {}, train__activation_checkpointing=True)
    backbone = make_plan(recipe, PlanRequest(GPU, 1, 2, 100)).backbone
    statistics, again, sums = (
        sum(number for each, number in operations.items() if each.call and each.call.function is op)
        for operations, op in (
            (backbone.forward, torch.ops.aten.batch_norm_update_stats.default),
            (backbone.backward, torch.ops.aten.batch_norm_update_stats.default),
            (backbone.backward, torch.ops.aten.batch_norm_backward_reduce.default),
        )
    )
    assert statistics == sums == len(backbone.batch_norms) > 0
    assert again == len(backbone.norms_again) > 0


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


@pytest.mark.parametrize("memory_mib", [None, 4])
@pytest.mark.parametrize("num_sms", [3, 20, 1000])
def test_the_planned_blocks_are_those_of_a_head_on_the_planned_gpu(
    tmp_path: Path, memory_mib: int | None, num_sms: int
):
    machine = replace(GPU, memory=1 << 32, num_sms=num_sms)
    recipe = recipe_of(tmp_path, {"memory_mib": memory_mib})
    num_classes = 300_000 if memory_mib is None else 10_000
    plan = make_plan(recipe, PlanRequest(machine, 1, 1, num_classes))
    head = build_head(
        recipe.head,
        dim=plan.backbone.dim,
        num_classes=num_classes,
        label_vectors=None,
        mesh=None,
        seed=0,
        device="cpu",
    )
    head.engine = replace(head.engine, processor=machine.processor)
    loss = head(torch.randn(BATCH, head.dim, requires_grad=True), torch.arange(BATCH))
    blocks = loss.grad_fn.step.walk.blocks
    assert plan.head.blocks == len(blocks) > 2
    assert plan.head.block_classes == len(blocks[0].class_ids)
    assert plan.head.memory_mib == (memory_mib or 256)


def test_copies_of_class_rows_in_half_precision_fit_the_planned_blocks(tmp_path: Path):
    for precision, column in (("fp32", 4 * 2), ("bf16", 2 * 16)):
        keys = {"train__global_batch": 2, "train__precision": precision}
        recipe = glyph_recipe(tmp_path, tmp_path / "run", head={"memory_mib": 1}, **keys)
        plan = make_plan(recipe, PlanRequest(GPU, 1, 1, 20_000))
        assert plan.backbone.dim == 16
        assert plan.head.block_classes == 2**20 // 8 // column


def launches_of(head: ClassHead) -> int:
    features = torch.randn(BATCH, head.dim, requires_grad=True)
    labels = torch.arange(BATCH)
    with OperationRecorder() as recorder:
        head.train()(features, labels).backward()
    return number(recorder.operations, "launches")


SYNCHRONOUS = {"train__synchronous": True}
DEEPSPEED = {"train__strategy": {"kind": "deepspeed"}, "optimizer": {"kind": "adamw"}}
# The keys of a recipe, whether its steps are deferred, and how often the host waits in a step.
WAITING: dict[str, tuple[dict[str, Any], bool, int]] = {
    "ddp": ({}, True, 0),
    "fsdp": ({"train__strategy": FSDP}, True, 0),
    "ddp, synchronous": (SYNCHRONOUS, False, 1),
    "fsdp, synchronous": ({"train__strategy": FSDP} | SYNCHRONOUS, False, 1),
    "ddp, not synchronous": ({"train__synchronous": False}, True, 0),
    "deepspeed": (DEEPSPEED, False, 1),
    "deepspeed, synchronous": (DEEPSPEED | SYNCHRONOUS, False, 1),
    "lamb": ({"optimizer": {"kind": "lamb"}}, True, 0),
    "lamb, synchronous": ({"optimizer": {"kind": "lamb"}} | SYNCHRONOUS, False, 1),
    "fp16, synchronous": (SYNCHRONOUS | {"train__precision": "fp16"}, False, 1),
    "sampled": ({"head": {"loss": {"kind": "ce", "sample_rate": 0.1}}}, True, 2),
    "topk_hinge": ({"head": {"loss": {"kind": "topk_hinge"}}}, True, 0),
    "factored": ({"head": FACTORED}, False, 19),
    "factored, synchronous": ({"head": FACTORED} | SYNCHRONOUS, False, 19),
    "micro-batches": ({"train__micro_batches": 2}, True, 0),
    "micro-batches, synchronous": ({"train__micro_batches": 2} | SYNCHRONOUS, False, 1),
    "mixed, clipped, averaged": (
        {
            "data__augment__mix": {"mixup_alpha": 0.2},
            "train__clip_norm": 1.0,
            "train__ema": {},
        },
        True,
        0,
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_plan_counts_how_often_the_host_waits(tmp_path: Path, name: str):
    keys, defers, waits = WAITING[name]
    recipe = glyph_recipe(tmp_path, tmp_path / "run", **({"train__precision": "bf16"} | keys))
    plan = make_plan(recipe, PlanRequest(GPU, 1, 2, 1000))
    assert plan.time.waits == waits
    assert plan.operations.defers is defers


class IgnoresFoundInf(AdamW):
    def build(
        self, groups: list[dict[str, Any]], norm_group: ProcessGroup | None = None
    ) -> Optimizer:
        return torch.optim.AdamW(groups, **self.options(), foreach=True)


@pytest.mark.parametrize("synchronous", [None, True])
def test_the_host_waits_once_with_an_optimizer_that_ignores_found_inf(
    tmp_path: Path, synchronous: bool | None
):
    recipe = glyph_recipe(tmp_path, tmp_path / "run", train__synchronous=synchronous)
    recipe = recipe.model_copy(update={"optimizer": IgnoresFoundInf()})
    plan = make_plan(recipe, PlanRequest(GPU, 1, 2, 1000))
    assert plan.time.waits == 1
    assert not plan.operations.defers


@pytest.mark.parametrize("keys", [DEEPSPEED, {"head": FACTORED}])
def test_a_plan_rejects_deferred_steps_where_training_would(tmp_path: Path, keys: dict[str, Any]):
    recipe = glyph_recipe(tmp_path, tmp_path / "run", train__synchronous=False, **keys)
    with pytest.raises(ValueError, match="synchronous is false, but"):
        assert make_plan(recipe, PlanRequest(GPU, 1, 2, 1000)).operations


def test_a_planned_synchronous_step_on_a_gpu_is_that_of_the_trainer(tmp_path: Path):
    recipe = recipe_of(tmp_path, {}, train__synchronous=True, train__micro_batches=2)
    planned = make_plan(recipe, PlanRequest(GPU, 1, 1, CLASSES)).operations.phases
    # On the CPU, a task that is flagged takes the same step as on a GPU.
    real = recorded_step(recipe, CLASSES, flagged=True)
    for phase in ("head", "optimizer", "step"):
        assert number(planned[phase], "launches") == number(real[phase], "launches"), phase


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


class Operands(TorchDispatchMode):
    """Records the first number of each operand of the operations in `functions`."""

    def __init__(self, functions: set[Any]) -> None:
        super().__init__()
        self._functions = functions
        self.of_runs: dict[Any, list[list[float]]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._functions:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.of_runs[func].append([float(tensor.flatten()[0]) for tensor in tensors])
        return func(*args, **kwargs)


def test_a_timer_runs_operations_in_place_on_the_same_numbers_each_time():
    numbers, more = torch.zeros(8), torch.zeros(8)
    with OperationRecorder() as recorder:
        numbers.exp_()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.zeros(2, 2))
        torch._foreach_add_([numbers, more], [more, more])
    timed = {each.call.function: each for each in recorder.operations if each.call}
    functions = {torch.ops.aten.exp_.default, torch.ops.aten.mm.out}
    functions.add(torch.ops.aten._foreach_add_.List)
    timer = OperationTimer(threads=1)
    with Operands(functions) as operands:
        for function in functions:
            timer.seconds(timed[function], step_bytes=0, otherwise=math.nan)
    assert operands.of_runs.keys() == functions
    for runs in operands.of_runs.values():
        first, *others = runs[1:]  # the operation runs once to warm up
        assert others
        assert all(run == first for run in others)
        assert all(0 <= value <= 1 for value in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_timer_creates_operands_of_every_dtype(dtype: torch.dtype):
    numbers = torch.zeros(8, dtype=dtype)
    with OperationRecorder() as recorder:
        numbers.to(torch.float64)
    (conversion,) = recorder.operations
    assert OperationTimer(threads=1).seconds(conversion, step_bytes=0, otherwise=math.nan) > 0
