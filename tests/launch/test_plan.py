"""`kway plan`: its arithmetic, its advice, its output, and the memory of real steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from data.shards.hierarchy import ClassPaths
from heads.tree import label_tree_of_paths
from heads.tree.named_tree import NamedTree
from launch.plan.cluster import Cluster, Collective, Machine
from launch.plan.head import Classes, LossCost
from launch.plan.memory import CheckpointCost
from launch.plan.plan import Plan, changes
from launch.plan.request import PlanRequest
from tests.launch.measured_step import measure_steps
from tests.ranks import run_on_ranks
from tests.shards import TINY_RESNET, glyph_recipe, text_recipe
from tests.trainer.training import started, take_steps
from trainer.backbone.backbone import build_backbone
from trainer.backbone.trace import trace_backbone
from trainer.checkpoints.entries import training_entries
from trainer.checkpoints.pieces import Ownership
from trainer.config import Recipe

GPU = Machine("gpu", "cuda", 1 << 36, 1e12, {"fp32": 1e13, "bf16": 1e14}, 1e11, 1e10)
CPU = replace(GPU, kind="cpu")
ADAMW, FSDP = {"kind": "adamw"}, {"kind": "fsdp"}
FUSED = {"kind": "sgd", "momentum": 0, "head": {"fused_sgd": "in_backward"}}


def planned(
    folder: Path, *, nodes: int = 1, gpus: int = 2, classes: int = 1000, **keys: Any
) -> Plan:
    recipe = glyph_recipe(folder, folder / "run", **keys)
    return Plan(recipe, GPU, PlanRequest(nodes, gpus, classes=classes))


def line(plan: Plan, what: str) -> int:
    return plan.memory.lines.get(what, (0,))[0]


def bytes_of(plan: Plan, phase: str, what: str) -> dict[tuple[str, str], int]:
    found = [each for each in plan.collectives if (each.phase, each.what) == (phase, what)]
    return {(each.operation, each.group): each.bytes * each.calls for each in found}


# ---- the cluster


@pytest.mark.parametrize(
    ("class_ranks", "group", "crosses"),
    [
        (8, "class", False),
        (16, "class", True),
        (3, "class", True),
        (8, "data", True),
        (16, "data", False),
        (8, "world", True),
    ],
)
def test_a_group_crosses_nodes_if_its_ranks_are_on_several_nodes(class_ranks, group, crosses):
    assert Cluster(GPU, 2, 8, class_ranks).crosses_nodes(group) is crosses


def test_ring_traffic_and_time_follow_the_algorithm_and_the_slowest_link():
    cluster = Cluster(GPU, 2, 4, 4)
    for kind, share in {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_reduce": 14 / 8}.items():
        each = Collective("", kind, "world", 8_000_000, "head", calls=2)  # type: ignore[arg-type]
        assert cluster.sent(each) == pytest.approx(16_000_000 * share)
        assert cluster.seconds(each) > cluster.sent(each) / GPU.network
    inside = Collective("", "all_gather", "class", 4_000_000_000, "head")
    assert cluster.seconds(inside) == pytest.approx(3e9 / GPU.link, rel=0.01)


# ---- memory and traffic by hand


def test_a_head_of_a_hundred_million_classes_is_planned_without_allocating_it(tmp_path: Path):
    plan = planned(tmp_path, nodes=16, gpus=8, classes=100_000_000, train__global_batch=1024)
    dim = plan.backbone.dim
    assert line(plan, "head weights") == -(-100_000_000 // 128) * (dim + 1) * 4
    assert line(plan, "class index") < 100_000_000
    assert bytes_of(plan, "head", "features") == {("all_gather", "class"): 1024 * dim * 4}
    # The class list is mapped. Each rank is planned like the main rank, which has the counts of all
    # classes from an evaluation.
    assert plan.host.peak_phase == "evaluating"
    assert plan.host.peak == pytest.approx(8 * 37.3 * 10**8, rel=0.03)


def test_class_groups_of_one_rank_need_more_memory_and_reduce_head_gradients(tmp_path: Path):
    shared, alone = (planned(tmp_path, gpus=4, train__class_group=g) for g in ("world", 1))
    assert line(alone, "head weights") == 4 * line(shared, "head weights")
    total = 1000 * (alone.backbone.dim + 1) * 4
    assert bytes_of(alone, "head", "head gradients") == {("all_reduce", "data"): total}
    assert not bytes_of(shared, "head", "head gradients")


def test_fsdp_shards_the_backbone_in_the_node_and_sums_shards_across_nodes(tmp_path: Path):
    groups = planned(tmp_path, nodes=4, gpus=4, train__strategy={**FSDP, "shard_group": "node"})
    piece = line(groups, "backbone weights")
    assert piece == pytest.approx(groups.backbone.numel * 4 / 4, rel=0.2)
    gradients = bytes_of(groups, "backward", "gradients")
    assert gradients["all_reduce", "replicate"] == piece
    assert gradients["reduce_scatter", "shard"] == pytest.approx(4 * piece, rel=0.2)
    assert groups.cluster.crosses_nodes("replicate")
    assert not groups.cluster.crosses_nodes("shard")


@pytest.mark.parametrize(
    ("dtype", "optimizer", "rows", "moments", "gradients"),
    [
        ("fp32", ADAMW, 4, 8, 4),
        ("fp32", {"kind": "sgd"}, 4, 4, 4),
        ("bf16", ADAMW, 2, 4, 2 + 4),  # rounded from float32 sums
        ("fp32", FUSED, 4, 0, 0),
        ("fp8", FUSED, 1, 0, 0),
    ],
)
def test_every_optimizer_and_row_type_is_planned(
    tmp_path: Path, dtype: str, optimizer: dict[str, Any], rows: int, moments: int, gradients: int
):
    plan = planned(
        tmp_path, classes=10**6, head__dtype=dtype, head__bias=False, optimizer=optimizer
    )
    numbers = plan.head.nodes * plan.head.dim
    scales = 2 * plan.head.nodes if dtype == "fp8" else 0
    assert line(plan, "head weights") == rows * numbers + scales
    of_backbone = plan.recipe.optimizer.num_moments * 4 * plan.backbone.numel
    assert line(plan, "optimizer moments") == moments * numbers + of_backbone
    assert line(plan, "head gradients") == gradients * numbers
    assert plan.seconds > 0


def test_the_trace_counts_the_products_of_an_encoder_and_all_of_its_weights(tmp_path: Path):
    recipe = text_recipe(tmp_path, tmp_path / "run")
    network = trace_backbone(recipe, rows=4, ranks=1, cuda=False)
    tokens, width, layers = 4 * 24, 16, 2
    products = layers * (4 * width * width + 2 * width * 24) + layers * 2 * 24 * width
    forward = sum(each.flops * num for each, num in network.forward_work.items())
    assert forward == 2 * tokens * products
    images = glyph_recipe(tmp_path, tmp_path / "run")
    network = trace_backbone(images, rows=2, ranks=1, cuda=False)
    backbone = build_backbone(images.backbone, image=images.data.image)
    assert network.numel == sum(p.numel() for p in backbone.parameters())
    assert len(network.units) == len(TINY_RESNET["depths"]) + 1


def test_the_memory_of_other_micro_batches_is_on_the_line_through_two_traces(tmp_path: Path):
    recipe = glyph_recipe(tmp_path, tmp_path / "run", train__precision="bf16")
    few, some, many = (trace_backbone(recipe, rows=rows, ranks=2, cuda=True) for rows in (2, 8, 32))
    found = many.at(8, few)
    assert found.activations == pytest.approx(some.activations, rel=0.02)
    assert found.backward == pytest.approx(some.backward, rel=0.02)


# ---- time by hand


def test_the_time_of_a_head_follows_the_formulas(tmp_path: Path):
    """With tiles, and with torch operations if bandwidth is infinite."""
    machine = replace(GPU, num_sms=100)
    keys: dict[str, Any] = {"head__bias": False, "train__precision": "bf16"}
    for tiles in (True, False):
        recipe = glyph_recipe(tmp_path, tmp_path / "run", head__tiles=tiles, **keys)
        batch, dim, classes = recipe.train.global_batch, 64, 10**6
        fast = replace(machine, bandwidth=machine.bandwidth if tiles else 1e30)
        plan = Plan(recipe, fast, PlanRequest(classes=classes))
        dim = plan.head.dim
        product = 2 * batch * classes * dim / machine.flops["bf16"]
        again = 1 - plan.head.saved / plan.head.logits
        expected = (3 + again) * product
        if tiles:
            moved = 0.3 * batch * classes + 11.9 * classes * dim
            expected = 4.17 * product + moved / machine.bandwidth
        (head,) = [phase for phase in plan.phases if phase.phase == "head"]
        assert head.seconds == pytest.approx(expected, rel=1e-3), tiles


def test_a_loss_counts_its_passes_over_the_logits():
    """Cross-entropy reads the logits for their maximum, writes and reads shifted ones, their powers
    and reads the sum: 24 bytes. Backward reads the powers and writes the gradient: 8 bytes."""
    from heads.losses import CrossEntropy

    cost = LossCost.of(CrossEntropy())
    assert cost.statistics == pytest.approx(24, abs=0.2)
    assert cost.gradient - cost.statistics == pytest.approx(8, abs=0.2)


def test_only_convolutions_are_planned_at_the_tf32_rate_unless_tf32_is_enabled(tmp_path: Path):
    """If memory bandwidth is infinite, only matrix products take time."""
    rates = {"fp32": 1e13, "tf32": 1e14, "bf16": 1e15}
    machine, request = replace(GPU, bandwidth=1e30, flops=rates), PlanRequest(classes=1000)
    for make, tf32, rate in (
        (glyph_recipe, False, 1e14),
        (text_recipe, False, 1e13),
        (text_recipe, True, 1e14),
    ):
        plan = Plan(make(tmp_path, tmp_path / "run", train__tf32=tf32), machine, request)
        seconds = {phase.phase: phase.compute for phase in plan.phases}
        work = plan.backbone.forward_work + plan.backbone.backward_work
        flops = sum(each.flops * num for each, num in work.items())
        assert seconds["forward"] + seconds["backward"] == pytest.approx(flops / rate)


# ---- plans that do not fit


def test_changes_are_suggested_until_the_plan_fits(tmp_path: Path):
    keys: dict[str, Any] = {
        "train__global_batch": 4096,
        "train__class_group": 1,
        "head__memory_mib": 512,  # the default depends on the memory of the GPU
    }
    roomy = planned(tmp_path, gpus=4, classes=20_000, **keys)
    for missing in (10_000_000, roomy.backbone.activations // 2):
        machine = replace(GPU, memory=roomy.memory.peak - missing)
        plan = Plan(roomy.recipe, machine, roomy.request)
        assert not plan.memory.fits
        found = changes(plan)
        assert [after.memory.fits for _, after in found] == [False] * (len(found) - 1) + [True]
        assert found[0][0] == "train.class_group=world"
        assert found[-1][1].memory.peak < plan.memory.peak


def test_deepspeed_stages_are_tried_in_order(tmp_path: Path):
    keys: dict[str, Any] = {
        "optimizer": ADAMW,
        "train__activation_checkpointing": True,
        "train__global_batch": 8,
        "backbone__config": {**TINY_RESNET, "num_channels": 1, "hidden_sizes": [512, 2048]},
    }
    stage_0, stage_2 = (
        planned(tmp_path, gpus=8, train__strategy={"kind": "deepspeed", "stage": stage}, **keys)
        for stage in (0, 2)
    )
    machine = replace(GPU, memory=stage_2.memory.peak)
    found = changes(Plan(stage_0.recipe, machine, stage_0.request))
    assert [what for what, _ in found] == ["train.strategy.stage=1", "train.strategy.stage=2"]


# ---- checkpoints

COPIED = {"optimizer": ADAMW, "train__ema": {"decay": 0.9}}
CHECKPOINTS = ((None, "ddp"), (1, "ddp"), (None, "fsdp"))


def bytes_written_by_a_rank(shards: Path) -> list[int]:
    found = []
    for class_ranks, strategy in CHECKPOINTS:
        task = started(shards, class_ranks, **COPIED, train__strategy={"kind": strategy})
        take_steps(task, 1)
        pieces = Ownership(task.world.group, task.world.rank).choose(training_entries(task))
        found.append(sum(piece.tensor.nbytes for piece in pieces))
        task.strategy.close()
    return found


def test_the_planned_checkpoint_matches_what_ranks_write(glyphs, tmp_path: Path):
    of_ranks = run_on_ranks(2, bytes_written_by_a_rank, glyphs)
    for number, (class_ranks, strategy) in enumerate(CHECKPOINTS):
        written = [of_rank[number] for of_rank in of_ranks]
        keys = {**COPIED, "train__class_group": class_ranks or "world"}
        keys["train__strategy"] = {"kind": strategy}
        recipe = glyph_recipe(tmp_path, tmp_path / "run", **keys)
        plan = Plan(recipe, CPU, PlanRequest(gpus=2, classes=13))
        assert plan.checkpoint.size == pytest.approx(sum(written), rel=0.1)
        copied = plan.host.lines["checkpoint being written"][1]
        assert copied == plan.checkpoint.of_rank == pytest.approx(max(written), rel=0.15)


def test_the_interval_between_checkpoints_minimizes_the_lost_time():
    """Time is lost to saving, once per interval, and to repeating half an interval per failure."""
    cost = CheckpointCost(size=0, of_rank=0, save=60.0, resume=0.0)
    failures = 1 / (3600 * 50)
    best = cost.interval(failures_per_second=failures)

    def lost(interval: float) -> float:
        return cost.save / interval + failures * interval / 2

    assert best == pytest.approx(math.sqrt(2 * 60 * 3600 * 50))
    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))


# ---- the command


def write(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    return path


def test_the_command_prints_plain_tables(tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    options = ("--nodes", 64, "--gpus", 8, "--gpu", "t4", "--classes", 10**8, "--mtbf", 1000)
    assert kway("plan", path, "train.precision=bf16", *options) == 0
    shown = capsys.readouterr().out
    for words in ("head weights", "results of all", "a rank sends"):
        assert words in shown, words
    assert "fits in GPU memory:" in shown
    assert "save every" in shown
    assert "t4 does not support bf16" in shown
    assert "\x1b" not in shown
    assert "…" not in shown


def test_the_classes_of_shards_are_planned(glyphs, tmp_path):
    plan = Plan(glyph_recipe(glyphs, tmp_path / "run"), GPU, PlanRequest())
    assert plan.classes.num_classes == 13
    assert plan.collectives == []  # one rank


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "abacus", "--classes", 10], "--gpu abacus is unknown: choose one of"),
        ([], "pass --classes"),
        (["--classes", 10, "--mtbf", "nan"], "Invalid value for '--mtbf': "),
        (["--classes", 10, "--gpus", 4, "train.class_group=3"], "train.class_group is 3"),
        (
            ["--classes", 10, "--gpus", 4, "train.strategy={kind: fsdp, shard_group: 3}"],
            "train.strategy.shard_group is 3",
        ),
    ],
)
def test_an_impossible_plan_prints_a_one_line_error(tmp_path, error_of, options, words):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    assert words in error_of("plan", path, *options)


def test_unknown_trees_are_planned_with_their_largest_size(tmp_path: Path):
    assert Classes.of(glyph_recipe(tmp_path, tmp_path), 5, class_ranks=4) == Classes(5, 5)
    tree = planned(tmp_path, head={"weights": {"kind": "vtree"}})
    assert tree.classes.is_bound
    assert tree.classes.nodes == 1999


def test_known_trees_are_planned_with_their_size(tmp_path: Path):
    distinct: list[tuple[str, ...]] = [("a",), ("a", "b"), ("a", "c", "d"), ("e",), ()]
    paths = ClassPaths(distinct, np.array([0, 1, 1, 2, 2, 3, 4], np.int32))
    tree, inner = label_tree_of_paths(*paths)
    vtree = {"kind": "vtree", "tree": {"kind": "hierarchy"}}
    recipe = glyph_recipe(tmp_path, tmp_path, head={"weights": vtree})
    found = Classes.of(recipe, 7, class_ranks=1, paths=paths)
    assert (found.nodes, found.inner) == (tree.num_nodes, len(inner))
    assert found.depth == pytest.approx(1 + tree.depth[tree.node_of_class].mean())
    NamedTree(tree, tuple("abcdefg"), inner).save(tmp_path / "tree.safetensors")
    of_file = {"kind": "vtree", "tree": {"file": str(tmp_path / "tree.safetensors")}}
    found = Classes.of(
        glyph_recipe(tmp_path, tmp_path, head={"weights": of_file}), 7, class_ranks=1
    )
    assert (found.nodes, found.inner, found.is_bound) == (tree.num_nodes, len(inner), False)


# ---- the memory of real steps

NUM_CLASSES = 5000
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"optimizer": ADAMW},
    "ddp, micro-batches": {"train__micro_batches": 2, "train__ema": {}},
    "ddp, checkpointing": {"train__activation_checkpointing": True},
    "ddp, little memory": {"head": {"memory_mib": 1}},
    "ddp, mixed": {"data__augment__mix": {"mixup_alpha": 0.2}},
    "factored": {
        "head": {"weights": {"kind": "factored"}, "loss": {"kind": "quadratic"}, "bias": False}
    },
    "fsdp, texts": {"train__strategy": FSDP, "optimizer": ADAMW, "text": True},
    "fsdp, bf16 weights": {
        "train__strategy": {**FSDP, "param_dtype": "bf16"},
        "train__precision": "bf16",
        "text": True,
    },
} | {
    f"zero {stage}": {"train__strategy": {"kind": "deepspeed", "stage": stage}, "optimizer": ADAMW}
    for stage in (1, 3)
}
LASTING = ("backbone weights", "head weights", "optimizer moments", "moving averages")
LASTING += ("inputs and buffers", "class index", "strategy's buckets")


def test_measured_memory_is_within_10_percent_of_the_plan(tmp_path: Path):
    work = []
    for case in CASES.values():
        make = text_recipe if "text" in case else glyph_recipe
        keys = {"train__global_batch": 64, **case}
        keys.pop("text", None)
        recipe = make(tmp_path, tmp_path / "run", **keys)
        work.append((recipe, 1 if recipe.train.class_group == 1 else 2, NUM_CLASSES))
    wrong = []
    for name, (recipe, *_), own in zip(
        CASES, work, run_on_ranks(2, measure_steps, work)[0], strict=True
    ):
        plan = Plan(recipe, CPU, PlanRequest(gpus=2, classes=NUM_CLASSES))
        lasting = sum(line(plan, what) for what in LASTING)
        for what, real in own.items():
            found = plan.memory.peak - lasting if what == "peak" else line(plan, what)
            if abs(found - real) > 0.1 * real:
                wrong.append(f"{name}: {what}: {found} planned, {real} measured")
    assert not wrong, "\n".join(wrong)
