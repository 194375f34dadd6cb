"""`kway k8s render`: consistent manifests for a recipe and a size, or a one-line error."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.kubernetes.kustomize import Settings
from launch.kubernetes.render import render
from tests.k8s.manifests import ROOT, load_all, needs_kustomize, of_kind, one, option, pods, words
from tests.k8s.schemas import schema_errors
from trainer.recipe import build_recipe, load_recipe

pytestmark = needs_kustomize
RECIPE = ROOT / "launch/recipes/glyphs.yaml"
REMOTE = "data.shards=s3://bucket/shards"


@cache
def rendered(nodes: int, gpus: int, overlay: str, *overrides: str, **settings: Any) -> list[Any]:
    recipe = load_recipe(RECIPE, overrides)
    return load_all(render(recipe, Settings(**settings), nodes=nodes, gpus=gpus, overlay=overlay))


def recipe_of(manifests: list[Any]) -> Any:
    text = one(manifests, "ConfigMap")["data"]["recipe.yaml"]
    return build_recipe(yaml.safe_load(text), origin="test")


@pytest.mark.parametrize("overlay", ["job", "jobset", "trainjob", "kueue"])
@pytest.mark.parametrize(("nodes", "gpus"), [(3, 0), (4, 8)])
def test_manifests_have_the_requested_pods_and_ranks(overlay, nodes, gpus):
    manifests = rendered(nodes, gpus, overlay)
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []
    (pod,) = pods(manifests)
    line = words(pod.main)
    if overlay == "trainjob":
        assert one(manifests, "TrainJob")["spec"]["trainer"]["numNodes"] == nodes
        assert one(manifests, "TrainingRuntime")["spec"]["mlPolicy"]["numNodes"] == nodes
    else:
        assert pod.job["completions"] == pod.job["parallelism"] == nodes
        assert option(line, "--nnodes") == str(nodes)
        assert pod.job["backoffLimit"] == (0 if overlay == "jobset" else 4 * nodes)
    ranks = max(1, gpus)
    assert option(line, "--nproc") == str(ranks)
    for amounts in pod.main["resources"].values():
        assert amounts.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
        assert (amounts["cpu"], amounts["memory"]) == (str(8 * ranks), f"{32 * ranks}Gi")
    memory = {"medium": "Memory", "sizeLimit": f"{8 * ranks}Gi"}
    assert pod.volumes["shared-memory"]["emptyDir"] == memory


def test_the_config_map_contains_the_recipe_with_its_overrides():
    overrides = ["optimizer.lr=0.4", "head.loss={kind: batch_ce}"]
    assert recipe_of(rendered(2, 0, "job", *overrides)) == load_recipe(RECIPE, overrides)


def test_pods_with_gpus_train_on_cuda_with_a_cuda_image():
    for overlay in ("job", "jobset", "h100-8x"):
        manifests = rendered(2, 8, overlay)
        assert recipe_of(manifests).train.device == "cuda"
        (pod,) = pods(manifests)
        assert pod.main["image"].endswith("-cu130")
    assert recipe_of(rendered(2, 0, "job")).train.device == "auto"


@pytest.mark.parametrize("overlay", ["job", "trainjob"])
def test_claims_have_the_storage_class_or_are_omitted(overlay):
    named = of_kind(rendered(2, 0, overlay, storage_class="fast.ssd"), "PersistentVolumeClaim")
    assert [each["spec"]["storageClassName"] for each in named] == ["fast.ssd"] * 3
    others = [m for m in rendered(2, 0, overlay) if m["kind"] != "PersistentVolumeClaim"]
    assert rendered(2, 0, overlay, has_claims=False) == others


@pytest.mark.parametrize("folder", ["~/.cache/kway", "/tmp/cache", "runs/cache"])
def test_the_cache_may_be_on_a_scratch_volume_or_a_claim(folder):
    rendered(2, 0, "job", REMOTE, f"data.cache.folder={folder}")


@pytest.mark.parametrize("image", ["localhost:5000/a_b/kway:V1.2", f"kway@sha256:{'0' * 64}"])
def test_the_image_is_set(image):
    for overlay in ("job", "jobset", "trainjob"):
        assert [pod.main["image"] for pod in pods(rendered(2, 1, overlay, image=image))] == [image]


def test_the_command_prints_the_output_of_render(kway, capsys):
    assert kway("k8s", "render", "training", RECIPE, "seed=3", "--nodes", 3, "--gpus", 2) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert load_all(printed) == rendered(3, 2, "job", "seed=3")


def test_a_missing_kustomize_prints_a_one_line_error(error_of, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    error = error_of("k8s", "render", "training", RECIPE)
    assert error.startswith("error: kubectl is not on PATH: install")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--overlay", "h100"], "--overlay h100 is unknown"),
        (["--overlay", "monitoring"], "overlay monitoring has no training job"),
        (["train.class_group=4", "--gpus", "3"], "train.class_group is 4"),
        (["train.strategy={kind: fsdp, shard_group: 4}", "--gpus", "3"], "shard_group is 4"),
        (["--nodes", "16", "--gpus", "16"], "train.global_batch is 128"),
        (["--overlay", "h100-8x", "--gpus", "4"], "--gpus (ranks per pod) is 4, but overlay"),
        (["--overlay", "cpu-smoke"], "--gpus is 1, but overlay cpu-smoke is written for 0"),
        (["train.device=cpu", "--gpus", "2"], "train.device is cpu, but --gpus is 2"),
        (["run=runs/../../etc/x"], "run is runs/../../etc/x (/work/runs/../../etc/x in the pods"),
        (["run=shards/x"], "no writable claim is mounted there"),
        (["data.shards=/tmp/x"], "no claim is mounted there"),
        ([REMOTE, "data.cache.folder=shards/c"], "no writable volume is mounted there"),
        (["data.stream={shards: '/a/{0..9}.tar', samples: 9}"], "data.stream.shards is /a"),
        (["data.mixture=[{shards: /data/x}]"], "data.mixture.0.shards is /data/x"),
        (["--image", "reg:5000/kway"], "--image reg:5000/kway has no fixed tag"),
        (["--storage-class", "A_b"], "Invalid value for '--storage-class': pass the storage class"),
    ],
)
def test_inconsistent_input_exits_with_2_and_a_one_line_error(error_of, given, message):
    assert message in error_of("k8s", "render", "training", RECIPE, *given)
