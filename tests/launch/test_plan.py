"""`kway plan`: its arithmetic, output and errors, and the ranks of a dry run."""

import io
import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import ClassInfo, Manifest, ShardInfo, SourceInfo
from heads import ClassHead
from heads.losses import CrossEntropy
from heads.tree import LabelTree, build_cover_tree
from heads.weights import ClassWeights
from launch.plan.advice import changes, warnings
from launch.plan.backbone_cost import measure_backbone
from launch.plan.classes import Classes, classes_of
from launch.plan.cluster import Cluster, Machine
from launch.plan.device_memory import class_index
from launch.plan.dry_run import dry_run
from launch.plan.host_memory import ClassListCost, HostLine
from launch.plan.plan import Plan, PlanRequest, make_plan
from launch.plan.table import duration, show, size
from tests.ranks import run_on_ranks
from tests.shards import TINY_RESNET, glyph_recipe, text_recipe
from tests.trainer.tiny_classifiers import save_image_classifier
from tests.trainer.training import started, take_steps
from trainer.backbone.backbone import build_backbone
from trainer.bundle.spec import read_manifest
from trainer.checkpoints.entries import training_entries
from trainer.checkpoints.pieces import Ownership
from trainer.config import Recipe
from trainer.importing.classifier import ImportOptions, import_classifier
from trainer.strategies.cost import Collective

GPU = Machine("gpu", "cuda", 1 << 36, 1e12, {"fp32": 1e13, "bf16": 1e14}, 1e11, 1e10)


def planned(
    folder: Path, *, nodes: int = 1, gpus: int = 2, classes: int = 1000, **keys: Any
) -> Plan:
    return make_plan(
        glyph_recipe(folder, folder / "run", **keys), PlanRequest(GPU, nodes, gpus, classes)
    )


def memory_line(plan: Plan, what: str) -> int:
    return sum(line.head for line in plan.memory.lines if line.what == what)


def bytes_of(plan: Plan, what: str) -> dict[tuple[str, str], int]:
    return {(c.operation, c.group): c.total for c in plan.collectives if c.what == what}


# ---- the cluster


@pytest.mark.parametrize(
    ("class_ranks", "group", "crosses"),
    [
        (8, "class", False),
        (4, "class", False),
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


# ---- memory and traffic


def test_a_head_of_a_hundred_million_classes_is_planned_without_allocating_it(tmp_path: Path):
    plan = planned(tmp_path, nodes=16, gpus=8, classes=100_000_000, train__global_batch=1024)
    dim = plan.backbone.dim
    assert memory_line(plan, "head weights") == -(-100_000_000 // 128) * (dim + 1) * 4
    assert memory_line(plan, "class index") >= 8 * 100_000_000  # the row of every class
    features = bytes_of(plan, "head: features")
    assert features == {("all_gather", "class"): 1024 * dim * 4}


def test_class_groups_of_one_rank_need_more_memory_and_reduce_head_gradients(tmp_path: Path):
    shared = planned(tmp_path, gpus=4)
    alone = planned(tmp_path, gpus=4, train__class_group=1)
    assert memory_line(alone, "head weights") == 4 * memory_line(shared, "head weights")
    total = 1000 * (alone.backbone.dim + 1) * 4
    assert bytes_of(alone, "head: weight gradients") == {("all_reduce", "data"): total}
    assert not bytes_of(shared, "head: weight gradients")
    assert not bytes_of(alone, "head: features")


def test_the_plan_shards_the_backbone_by_strategy(tmp_path: Path):
    ddp = planned(tmp_path, gpus=8)
    fsdp = planned(tmp_path, gpus=8, train__strategy={"kind": "fsdp"})
    total = ddp.backbone.numel * 4
    assert memory_line(ddp, "backbone weights") == total
    assert memory_line(fsdp, "backbone weights") == pytest.approx(total / 8, rel=0.2)


def test_the_statistics_of_many_ranks_are_planned_as_all_reduces(tmp_path: Path):
    few, many = (
        planned(tmp_path, nodes=nodes, gpus=8, train__global_batch=4096) for nodes in (1, 64)
    )
    size = 4096 * 4  # of one statistic; ce has two, of which one is a logsumexp
    assert bytes_of(few, "head: statistics") == {("all_gather", "class"): 8 * 2 * size}
    assert bytes_of(many, "head: statistics") == {("all_reduce", "class"): 2 * size}
    assert bytes_of(many, "head: maxima of statistics") == {("all_reduce", "class"): size}


def test_shard_groups_of_a_node_gather_in_the_node_and_sum_shards_across_nodes(tmp_path: Path):
    whole, groups = (
        planned(tmp_path, nodes=4, gpus=4, train__strategy={"kind": "fsdp", "shard_group": group})
        for group in ("world", "node")
    )
    assert not bytes_of(whole, "FSDP: shards of gradients")
    (shards,) = bytes_of(groups, "FSDP: shards of gradients").items()
    piece = memory_line(groups, "backbone weights")
    assert shards == (("all_reduce", "replicate"), piece)
    assert piece == pytest.approx(groups.backbone.numel * 4 / 4, rel=0.2)
    crossing = {c.what: groups.cluster.crosses_nodes(c.group) for c in groups.collectives}
    assert not crossing["FSDP: weights"]
    assert not crossing["norm of the backbone"]
    assert crossing["FSDP: shards of gradients"]
    assert groups.recipe.train.strategy.smaller(whole_tensors=False) == whole.recipe.train.strategy


def test_bf16_weights_and_gradients_halve_the_traffic_of_fsdp(tmp_path: Path):
    half = {"param_dtype": "bf16", "reduce_dtype": "bf16", "shard_group": "node"}
    plans = [
        planned(
            tmp_path,
            nodes=2,
            train__precision="bf16",
            train__strategy={"kind": "fsdp", "shard_group": "node", **options},
        )
        for options in ({}, half)
    ]
    # The weights of batch norm are not rounded, and are not gathered again. Their gradients are
    # rounded.
    of_norms = " of batch norm"
    for name, norms, factor in (
        ("weights", "weights", 1),
        ("weights again", "weights", 1),
        ("gradients", "gradients", 2),
        ("shards of gradients", "shards of gradients", 2),
    ):
        (single,), (rounded,) = (bytes_of(plan, f"FSDP: {name}").values() for plan in plans)
        (apart,) = bytes_of(plans[1], f"FSDP: {norms}{of_norms}").values()
        assert single == 2 * rounded + factor * apart, name
        assert rounded > apart > 0
    assert not bytes_of(plans[1], f"FSDP: weights again{of_norms}")
    single_blocks, blocks = (plan.memory.lines for plan in plans)
    assert sum(line.backward for line in blocks) < sum(line.backward for line in single_blocks)
    assert memory_line(plans[0], "backbone weights") == memory_line(plans[1], "backbone weights")


FUSED = {"kind": "sgd", "head": {"fused_sgd": "in_backward"}}


@pytest.mark.parametrize(
    ("dtype", "optimizer", "rows", "moments", "gradients"),
    [
        ("fp32", {"kind": "adamw"}, 4, 8, 4),
        ("bf16", {"kind": "adamw"}, 2, 4, 2 + 4),  # rounded from float32 sums
        ("fp32", FUSED, 4, 0, 0),
        ("bf16", FUSED, 2, 0, 0),
        ("fp8", FUSED, 1, 0, 0),
    ],
)
def test_row_types_and_fused_updates_save_memory(
    tmp_path: Path,
    dtype: str,
    optimizer: dict[str, Any],
    rows: int,
    moments: int,
    gradients: int,
):
    plan = planned(
        tmp_path,
        classes=10**6,
        head__dtype=dtype,
        head__bias=False,
        optimizer=optimizer,
    )
    numbers = plan.head.nodes * plan.head.dim
    scales = 2 * plan.head.nodes if dtype == "fp8" else 0
    assert memory_line(plan, "head weights") == rows * numbers + scales
    of_backbone = {"adamw": 2, "sgd": 1}[optimizer["kind"]] * 4 * plan.backbone.numel
    assert memory_line(plan, "optimizer moments") == moments * numbers + of_backbone
    assert memory_line(plan, "head gradients") == gradients * numbers


def test_a_deferred_update_computes_the_logits_once_more(tmp_path: Path):
    def products(fused_sgd: str | None, clip_norm: float | None = None) -> float:
        optimizer = {"kind": "sgd", "momentum": 0, "head": {"fused_sgd": fused_sgd}}
        plan = planned(
            tmp_path,
            classes=10**5,
            head__memory_mib=1,
            optimizer=optimizer,
            train__clip_norm=clip_norm,
            train__micro_batches=1,
        )
        flops = sum(
            each.flops * number
            for operations in plan.operations.phases.values()
            for each, number in operations.items()
        )
        return flops / (2 * plan.head.logits * plan.head.dim)

    # Forward, the gradients of features and rows, and the logits that forward does not save.
    usual = products(None)
    again = usual - 3
    assert 0.8 < again < 1
    assert products("in_backward") == usual
    assert products("deferred") == pytest.approx(usual + again)
    assert products("deferred", 1.0) == pytest.approx(usual + again + 1)


def test_activation_checkpointing_saves_memory_and_adds_computation(tmp_path: Path):
    saved = planned(tmp_path)
    recomputed = planned(tmp_path, train__activation_checkpointing=True)
    assert recomputed.backbone.activations < 0.75 * saved.backbone.activations
    assert recomputed.backbone.flops > saved.backbone.flops


def test_half_precision_halves_the_traffic_of_features(tmp_path: Path):
    plans = planned(tmp_path), planned(tmp_path, train__precision="bf16")
    (single,), (half,) = (bytes_of(plan, "head: features").values() for plan in plans)
    assert single == 2 * half


def test_flops_of_a_backbone_are_the_sum_over_its_layers(tmp_path: Path):
    recipe = text_recipe(tmp_path, tmp_path / "run")
    network = measure_backbone(recipe, rows=4, ranks=1, cuda=False)
    tokens, width, layers = 4 * 24, 16, 2
    linear = layers * (4 * width * width + 2 * width * 24)
    attention = layers * 2 * 24 * width
    assert sum(each.flops * num for each, num in network.forward.items()) == 2 * tokens * (
        linear + attention
    )


def seconds_of_products(plan: Plan) -> dict[str, float]:
    return {phase.phase: phase.compute for phase in plan.time.phases if phase.compute}


def test_only_convolutions_are_planned_at_the_tf32_rate_unless_tf32_is_enabled(tmp_path: Path):
    """If memory bandwidth is infinite, only matrix products take time."""
    rates = {"fp32": 1e13, "tf32": 1e14, "bf16": 1e15}
    machine = Machine("gpu", "cuda", 1 << 36, 1e30, rates, 1e11, 1e10)
    request = PlanRequest(machine, 1, 1, 1000)
    images = make_plan(glyph_recipe(tmp_path, tmp_path / "run"), request)
    texts = make_plan(text_recipe(tmp_path, tmp_path / "run"), request)
    for plan, rate in ((images, rates["tf32"]), (texts, rates["fp32"])):
        seconds = seconds_of_products(plan)
        backbone = seconds["forward"] + seconds["backward"]
        assert backbone == pytest.approx(plan.backbone.flops / rate)
        assert seconds["head"] == pytest.approx(6 * plan.head.logits * plan.head.dim / 1e13)
    fast = make_plan(text_recipe(tmp_path, tmp_path / "run", train__tf32=True), request)
    assert sum(seconds_of_products(fast).values()) == pytest.approx(
        sum(seconds_of_products(texts).values()) / 10
    )
    half = make_plan(glyph_recipe(tmp_path, tmp_path / "run", train__precision="bf16"), request)
    seconds = seconds_of_products(half)
    assert seconds["forward"] + seconds["backward"] == pytest.approx(half.backbone.flops / 1e15)
    assert seconds["head"] == pytest.approx(seconds_of_products(images)["head"] / 100)


@pytest.mark.parametrize("kind", ["dense", "utree", "vtree"])
def test_the_planned_class_index_has_the_size_of_the_real_one(tmp_path: Path, kind: str):
    vectors = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    recipe = glyph_recipe(tmp_path, tmp_path / "run", head={"weights": {"kind": kind}})
    cover = build_cover_tree(vectors)
    trees = {"dense": LabelTree.dense(3000), "utree": cover.utree(), "vtree": cover.vtree()}
    plan = make_plan(recipe, PlanRequest(GPU, 1, 2, 3000), label_vectors=vectors)
    weights = ClassWeights(trees[kind], group_size=2, device=torch.device("cpu"))
    assert plan.classes.nodes == trees[kind].num_nodes
    assert class_index(plan.head) == pytest.approx(_tensor_bytes(vars(weights)), rel=0.1)


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, LabelTree):
        return 0
    if isinstance(value, dict):
        return sum(_tensor_bytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(each) for each in value)
    return _tensor_bytes(vars(value)) if hasattr(value, "__dict__") else 0


def test_a_missing_label_tree_is_planned_with_its_largest_size(tmp_path: Path):
    recipe = glyph_recipe(tmp_path, tmp_path / "run", head={"weights": {"kind": "vtree"}})
    classes = classes_of(recipe, None, 1000, class_ranks=4)
    assert (classes.nodes, classes.exact) == (1999, False)
    assert any(
        "label tree is not available" in line
        for line in warnings(planned(tmp_path, head={"weights": {"kind": "vtree"}}))
    )


def test_trailing_ranks_may_have_no_classes():
    assert Classes(5, 5, 1.0, 0, 0, plain=True, exact=True).min_nodes(4) == 0
    assert Classes(5, 5, 1.0, 0, 0, plain=True, exact=True).max_nodes(4) == 2


# ---- plans that do not fit


def test_changes_are_suggested_until_the_plan_fits(tmp_path: Path):
    keys: dict[str, Any] = {
        "train__global_batch": 4096,
        "train__class_group": 1,
        "head__memory_mib": 512,  # the default depends on the memory of the GPU
    }
    roomy = planned(tmp_path, gpus=4, classes=20_000, **keys)
    small = Machine("small", "cuda", roomy.memory.peak - 10_000_000, 1e12, GPU.flops, 1e11, 1e10)
    request = PlanRequest(small, 1, 4, 20_000)
    plan = make_plan(roomy.recipe, request)
    assert not plan.memory.fits
    found = changes(plan, request)
    assert [change.fits for change in found] == [False] * (len(found) - 1) + [True]
    assert found[0].what == "train.class_group=world"
    assert found[-1].peak < plan.memory.peak


def test_deepspeed_stages_are_tried_in_order(tmp_path: Path):
    keys: dict[str, Any] = {
        "optimizer": {"kind": "adamw"},
        "train__activation_checkpointing": True,
        "train__global_batch": 8,
        "backbone__config": {**TINY_RESNET, "num_channels": 1, "hidden_sizes": [512, 2048]},
    }
    stage_0, _, stage_2 = (
        planned(tmp_path, gpus=8, train__strategy={"kind": "deepspeed", "stage": stage}, **keys)
        for stage in range(3)
    )
    small = replace(GPU, memory=stage_2.memory.peak)
    request = PlanRequest(small, 1, 8, 1000)
    found = changes(make_plan(stage_0.recipe, request), request)
    assert [change.what for change in found] == [
        "train.strategy.stage=1",
        "train.strategy.stage=2",
    ]


def test_invalid_settings_give_warnings(tmp_path: Path):
    few = planned(tmp_path, gpus=8, classes=5, train__global_batch=4, train__precision="fp16")
    found = "\n".join(warnings(few))
    for words in ("train.global_batch is 4", "the head has 5 rows", "gpu does not support fp16"):
        assert words in found
    assert warnings(planned(tmp_path)) == []


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("train.class_group", {"train__class_group": 3}),
        ("train.strategy.shard_group", {"train__strategy": {"kind": "fsdp", "shard_group": 3}}),
    ],
)
def test_a_group_that_does_not_divide_the_ranks_is_rejected(tmp_path: Path, key, changes):
    recipe = glyph_recipe(tmp_path, tmp_path / "run", **changes)
    for plan in (make_plan, dry_run):
        with pytest.raises(ValueError, match=rf"{key} is 3 .* choose a divisor of 4"):
            plan(recipe, PlanRequest(GPU, 1, 4, 100))


# ---- the ranks of a dry run


@pytest.mark.parametrize(
    "strategy",
    [{"kind": "ddp"}, {"kind": "fsdp"}, {"kind": "fsdp", "shard_group": "node"}],
    ids=str,
)
def test_a_dry_run_builds_the_ranks_of_a_large_world(tmp_path: Path, strategy: dict[str, str]):
    recipe = glyph_recipe(
        tmp_path,
        tmp_path / "run",
        train__strategy=strategy,
        train__class_group="node",
        train__global_batch=1000,
    )
    ranks = dry_run(recipe, PlanRequest(GPU, 64, 8, 99_999_999))
    assert (ranks.size, ranks.mesh) == (512, (64, 8))
    first, *_, last = ranks.ranks
    assert [rank.rank for rank in ranks.ranks] == [0, 7, 256, 511]
    assert (last.node, last.data, last.class_) == (63, 63, 7)
    assert first.head_rows == (0, 12_500_000)
    assert last.head_rows == (87_500_000, 99_999_999)
    assert last.samples == (998, 1000)
    assert (first.backbone_numel == ranks.backbone_numel) is (strategy["kind"] == "ddp")


def test_a_dry_run_leaves_no_process_group_behind(tmp_path: Path):
    dry_run(glyph_recipe(tmp_path, tmp_path / "run"), PlanRequest(GPU, 2, 2, 100))
    assert not torch.distributed.is_initialized()


# ---- the command


def write(folder: Path, recipe: Recipe) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    return path


def test_the_command_prints_plain_tables(tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    assert kway("plan", path, "--nodes", 2, "--gpus", 8, "--classes", 10**6) == 0
    shown = capsys.readouterr().out
    for words in ("head weights", "DDP: gradients", "bound by", "world 16 across", "class list"):
        assert words in shown, words
    assert "fits in GPU memory:" in shown
    assert "(8 ranks reading the manifest)" in shown
    assert "\x1b" not in shown


def test_the_command_compares_with_the_given_main_memory(tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    options = ("--nodes", 64, "--gpus", 8, "--classes", 10**8, "--host-memory")
    assert kway("plan", path, *options, 512) == 0
    assert "does not fit in main memory: 9" in capsys.readouterr().out
    assert kway("plan", path, *options, 2048, "--json") == 0
    assert json.loads(capsys.readouterr().out)["host"]["fits"] is True


def test_tables_are_not_truncated_at_80_columns(tmp_path: Path):
    plan = planned(
        tmp_path,
        nodes=16,
        gpus=8,
        classes=10**8,
        train__global_batch=8192,
        train__micro_batches=4,
        train__strategy={"kind": "fsdp"},
        train__class_group="node",
    )
    console = Console(width=80, record=True, file=io.StringIO())
    show(plan, [], [], console)
    shown = console.export_text()
    assert "head: weight gradients," in shown
    assert "head gradients" in shown
    assert "…" not in shown


def test_the_command_prints_json(tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    assert kway("plan", path, "--gpu", "h200", "--classes", 1000, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    lines = numbers["memory"]["lines"]
    assert sum(line["head"] for line in lines) == numbers["memory"]["totals"]["head"]
    assert numbers["memory"]["fits"] is True
    assert numbers["steps"] == 4
    assert numbers["collectives"] == []  # one rank


def test_the_command_uses_overrides_and_shards(glyphs, tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(glyphs, tmp_path / "run", train__duration={"epochs": 3}))
    assert kway("plan", path, "train.global_batch=4", "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["classes"]["num_classes"] == 13
    assert numbers["steps"] > 3


def test_the_command_prints_the_ranks_of_a_dry_run(tmp_path, kway, capsys):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    options = ("--nodes", 2, "--gpus", 2, "--classes", 10, "--dry-run")
    assert kway("plan", path, *options) == 0
    assert "4 ranks, mesh data 1 x class 4" in capsys.readouterr().out
    assert kway("plan", path, *options, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["ranks"]) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "abacus", "--classes", 10], "--gpu abacus is unknown: choose one of"),
        ([], "pass --classes"),
        (["--classes", 10, "--gpus", 4, "train.class_group=3"], "train.class_group is 3"),
        (["--classes", 10, "optimizer.kind=lamb", "train.strategy.kind=deepspeed"], "lamb"),
    ],
)
def test_an_impossible_plan_prints_a_one_line_error(tmp_path, kway, capsys, options, words):
    path = write(tmp_path, glyph_recipe(tmp_path, tmp_path / "run"))
    assert kway("plan", path, *options) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_sizes_and_durations_are_printed_with_three_digits():
    assert [size(n) for n in (0, 999, 1000, 12_345_678, 3 << 40)] == [
        "-",
        "999 B",
        "0.98 KiB",
        "11.8 MiB",
        "3.00 TiB",
    ]
    assert [duration(s) for s in (0, 1e-9, 2e-6, 0.5, 90, 1e6)] == [
        "-",
        "< 0.1 us",
        "2 us",
        "500 ms",
        "90 s",
        "11.6 d",
    ]


def test_fsdp_units_contain_every_weight_once(tmp_path: Path):
    recipe = glyph_recipe(tmp_path, tmp_path / "run")
    network = measure_backbone(recipe, rows=2, ranks=1, cuda=False)
    backbone = build_backbone(recipe.backbone, image=recipe.data.image)
    assert network.numel == sum(p.numel() for p in backbone.parameters())
    assert len(network.units) == len(TINY_RESNET["depths"]) + 1


# ---- main memory


def host_line(plan: Plan, what: str) -> HostLine:
    return next(line for line in plan.host.lines if line.what == what)


def test_the_planned_main_memory_of_a_head_matches_the_memory_used_to_build_it(tmp_path: Path):
    recipe = glyph_recipe(tmp_path, tmp_path / "run")
    plan = make_plan(recipe, PlanRequest(GPU, 1, 1, 300_000))
    tracemalloc.start()
    head = ClassHead(plan.backbone.dim, 300_000, CrossEntropy())
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    line = host_line(plan, "label tree")
    assert line.head == pytest.approx(peak, rel=0.1)
    assert line.training == pytest.approx(kept, rel=0.1)
    # tracemalloc does not count the memory of torch, where the rows are.
    on_cpu = make_plan(recipe, PlanRequest(replace(GPU, kind="cpu"), 1, 1, 300_000))
    assert host_line(on_cpu, "first rows").head == head.weight.nbytes + head.bias.nbytes


# Run in a separate process, because peak and resident memory are measured per process.
_PARSE = """
import ctypes, gc, sys
from data.shards.manifest import Manifest

def resident(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

before = resident("VmRSS")
manifest = Manifest.read(sys.argv[1])
peak = resident("VmHWM")
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print(resident("VmRSS") - before, peak - before)
"""


@pytest.mark.parametrize("attributes", [0, 1, 3])
def test_a_class_list_uses_the_planned_main_memory(tmp_path: Path, attributes: int):
    num = 60_000
    classes = tuple(
        ClassInfo(
            name=f"a class of the test, number {i}",
            attributes={f"attribute {k}": f"{k} of {i}: {'é' * 20}" for k in range(attributes)},
        )
        for i in range(num)
    )
    shard = ShardInfo(
        file="a.tar", split="train", samples=1, bytes=10240, sha256="0" * 64, index_crc32=0
    )
    manifest = Manifest(source=SourceInfo(kind="test"), classes=classes, shards=(shard,))
    (tmp_path / "manifest.json").write_bytes(manifest.to_bytes())
    found = subprocess.run(
        [sys.executable, "-c", _PARSE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    kept, peak = map(int, found.stdout.split())
    cost = ClassListCost.of(classes)
    assert num * cost.kept == pytest.approx(kept, rel=0.15)
    assert num * cost.parsing == pytest.approx(peak, rel=0.2)


def test_main_memory_includes_the_class_list_of_every_rank(tmp_path: Path):
    plan = planned(tmp_path, nodes=16, gpus=8, classes=10**8)
    line = host_line(plan, "class list")
    assert line.manifest > line.head > line.training > 600 * 10**8
    assert plan.host.peak_moment == "manifest"
    assert plan.host.peak > 8 * line.manifest
    assert plan.host.fits is None
    for size_gib, fits in ((512, False), (2048, True)):
        request = PlanRequest(GPU, 16, 8, 10**8, host_bytes=size_gib << 30)
        assert make_plan(plan.recipe, request).host.fits is fits


def test_main_memory_includes_the_classes_and_vectors_of_the_shards(glyphs, tmp_path: Path):
    plan = make_plan(glyph_recipe(glyphs, tmp_path / "run"), PlanRequest(GPU, 1, 1))
    manifest = Manifest.load(glyphs)
    kept = 13 * ClassListCost.of(manifest.classes).kept
    assert host_line(plan, "class list").training == pytest.approx(kept, rel=0.05)
    vectors = load_label_vectors(glyphs, manifest)
    assert host_line(plan, "label vectors").training == pytest.approx(vectors.nbytes, rel=0.2)


def test_main_memory_includes_the_step_on_cpus(tmp_path: Path):
    cpu = replace(GPU, kind="cpu")
    plan = make_plan(glyph_recipe(tmp_path, tmp_path / "run"), PlanRequest(cpu, 1, 2, 1000))
    assert host_line(plan, "a step, as above").training == plan.memory.peak
    assert plan.host.capacity == 2 * cpu.memory


COPIED = {"optimizer": {"kind": "adamw"}, "train__ema": {"decay": 0.9}}


def bytes_written_by_a_rank(shards: Path, class_ranks: int | None, strategy: str) -> int:
    task = started(shards, class_ranks, **COPIED, train__strategy={"kind": strategy})
    take_steps(task, 1)
    pieces = Ownership(task.world.group, task.world.rank).choose(training_entries(task))
    written = sum(piece.tensor.nbytes for piece in pieces)
    task.strategy.close()
    return written


@pytest.mark.parametrize(
    ("ranks", "class_ranks", "strategy"),
    [(1, None, "ddp"), (2, None, "ddp"), (2, 1, "ddp"), (2, None, "fsdp")],
)
def test_the_planned_checkpoint_copy_matches_what_a_rank_writes(
    glyphs, tmp_path: Path, ranks: int, class_ranks: int | None, strategy: str
):
    written = run_on_ranks(ranks, bytes_written_by_a_rank, glyphs, class_ranks, strategy)
    changes = {**COPIED, "train__class_group": class_ranks or "world"}
    recipe = glyph_recipe(tmp_path, tmp_path / "run", **changes, train__strategy={"kind": strategy})
    plan = make_plan(recipe, PlanRequest(replace(GPU, kind="cpu"), 1, ranks, 13))
    line = host_line(plan, "checkpoint being written")
    assert line.training == pytest.approx(max(written), rel=0.15)


def test_a_recipe_that_starts_from_an_imported_bundle_can_be_planned(tmp_path, images, kway):
    names = {number: f"class {number}" for number in range(5)}
    save_image_classifier(tmp_path / "model", id2label=names)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle", ImportOptions())
    image = read_manifest(tmp_path / "bundle").model.image
    assert image is not None
    init = {"init": str(tmp_path / "bundle")}
    tree = {
        "run": str(tmp_path / "run"),
        "data": {"shards": str(images), "image": image.model_dump(mode="json")},
        "backbone": init,
        "head": init,
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(tree))
    assert kway("plan", recipe) == 0
