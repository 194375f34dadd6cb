"""`kway k8s render`: consistent manifests for a recipe and a size, or a one-line error."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch.kubernetes.agreement import on_devices
from launch.kubernetes.kustomize import FOLDER, Claims
from launch.kubernetes.objects import jobs, load, load_all, option, words
from launch.kubernetes.render import Size, overlays, render
from tests.k8s.built import ROOT, needs_kustomize, one, schema_errors
from trainer.recipe import build_recipe, load_recipe

pytestmark = needs_kustomize
RECIPE = ROOT / "launch/recipes/glyphs.yaml"
FETCHED = "data.shards=s3://bucket/shards"


def rendered(nodes: int, gpus: int, overlay: str, *overrides: str, **more: Any) -> list[Any]:
    return copy.deepcopy(_rendered(nodes, gpus, overlay, *overrides, **more))


@cache
def _rendered(nodes: int, gpus: int, overlay: str, *overrides: str, **more: Any) -> list[Any]:
    recipe = load_recipe(RECIPE, overrides)
    return load_all(render(recipe, Size(nodes, gpus), overlay=overlay, **more))


@pytest.mark.parametrize("overlay", ["job", "jobset", "trainjob", "kueue"])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (3, 0), (4, 8)])
def test_manifests_have_the_requested_pods_and_ranks(overlay, nodes, gpus):
    manifests = rendered(nodes, gpus, overlay)
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []
    (job,) = jobs(manifests)
    (container,) = job.pod.containers
    line = words(container, job.given)
    assert (job.num_pods, option(line, "--nnodes")) == (nodes, str(nodes))
    assert option(line, "--nproc") == str(max(1, gpus))
    ranks = max(1, gpus)
    for amounts in container["resources"].values():
        assert amounts.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
        assert (amounts["cpu"], amounts["memory"]) == (str(8 * ranks), f"{32 * ranks}Gi")
    memory = {"medium": "Memory", "sizeLimit": f"{8 * ranks}Gi"}
    assert job.pod.volumes["shared-memory"]["emptyDir"] == memory


def test_the_config_map_contains_the_recipe_with_its_overrides():
    manifests = rendered(2, 0, "job", "optimizer.lr=0.4", "head.loss={kind: batch_ce}")
    expected = load_recipe(RECIPE, ["optimizer.lr=0.4", "head.loss={kind: batch_ce}"])
    assert recipe_of(manifests) == expected


def recipe_of(manifests: list[Any]) -> Any:
    text = one(manifests, "ConfigMap")["data"]["recipe.yaml"]
    return build_recipe(load(text), origin="test")


@pytest.mark.parametrize("overlay", ["job", "jobset", "h100-8x"])
def test_gpu_pods_train_on_cuda_with_a_cuda_image(overlay):
    manifests = rendered(2, 8, overlay)
    assert recipe_of(manifests).train.device == "cuda"
    (job,) = jobs(manifests)
    assert {each["image"].rpartition("-")[2] for each in job.pod.containers} == {"cu130"}
    (job,) = jobs(rendered(2, 8, overlay, image="kway:1.2"))
    assert {each["image"] for each in job.pod.containers} == {"kway:1.2"}


def test_pods_without_gpus_use_the_device_of_the_recipe():
    assert recipe_of(rendered(2, 0, "job")).train.device == "auto"
    recipe = load_recipe(RECIPE, ["train.device=cpu"])
    assert on_devices(recipe, gpus=0) == recipe


@pytest.mark.parametrize("overlay", ["job", "trainjob"])
def test_claims_have_the_storage_class_or_are_omitted(overlay):
    kinds = [each["kind"] for each in rendered(2, 0, overlay)]
    named = rendered(2, 0, overlay, claims=Claims("fast.ssd"))
    claims = [each["spec"] for each in named if each["kind"] == "PersistentVolumeClaim"]
    assert [spec["storageClassName"] for spec in claims] == ["fast.ssd"] * 3
    left = [each["kind"] for each in rendered(2, 0, overlay, claims=Claims(printed=False))]
    assert left == [kind for kind in kinds if kind != "PersistentVolumeClaim"]


def test_the_cache_of_remote_shards_may_be_a_scratch_volume_or_a_claim():
    for folder in ("~/.cache/kway", "/tmp/cache", "runs/cache"):
        rendered(2, 0, "job", FETCHED, f"data.cache.folder={folder}")


def test_different_recipes_have_different_config_maps():
    names = {
        one(rendered(2, 1, "jobset", f"seed={seed}"), "ConfigMap")["metadata"]["name"]
        for seed in (1, 2, 1)
    }
    assert len(names) == 2


@pytest.mark.parametrize("overlay", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("image", ["registry:5000/a/kway:1.2", f"kway@sha256:{'0' * 64}"])
def test_image_and_namespace_are_set(overlay, image):
    manifests = rendered(2, 1, overlay, image=image, namespace="ml")
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"ml"}
    (job,) = jobs(manifests)
    assert [container["image"] for container in job.pod.containers] == [image]


def test_an_image_from_any_registry_is_accepted():
    digest = "sha256:" + "a" * 64
    for image in ("ghcr.io/a/kway:1", "localhost:5000/a_b/kway:V1.2", f"k:1@{digest}"):
        (job,) = jobs(rendered(2, 0, "job", image=image))
        assert job.pod.containers[0]["image"] == image.replace(":1@", "@")


def test_overlays_without_training_are_rejected():
    sizes = {"h100-8x": (2, 8), "cpu-smoke": (2, 0)}
    for overlay in overlays():
        nodes, gpus = sizes.get(overlay, (2, 1))
        if overlay in ("serving", "monitoring"):
            with pytest.raises(ValueError, match=f"overlay {overlay} has no training job"):
                rendered(nodes, gpus, overlay)
        else:
            assert len(list(jobs(rendered(nodes, gpus, overlay)))) == 1


def test_rendering_does_not_change_the_shipped_files():
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    rendered(4, 8, "jobset")
    assert {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()} == before


@pytest.fixture
def kway_render(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `kway k8s render` and return its exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = kway("k8s", "render", *arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_the_command_prints_the_output_of_render(kway_render):
    code, printed, errors = kway_render(str(RECIPE), "seed=3", "--nodes", "3", "--gpus", "2")
    assert (code, errors) == (0, "")
    assert load_all(printed) == rendered(3, 2, "job", "seed=3")


def test_a_missing_kustomize_prints_a_one_line_error(kway_render, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, printed, error = kway_render(str(RECIPE))
    assert (code, printed, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: neither kubectl nor kustomize is on PATH: install")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--overlay", "h100"], "--overlay h100 is unknown: choose one of cpu-smoke, "),
        (
            ["train.class_group=4", "--gpus", "3"],
            "train.class_group is 4",
        ),
        (
            ["train.strategy={kind: fsdp, shard_group: 4}", "--gpus", "3"],
            "train.strategy.shard_group is 4",
        ),
        (["--nodes", "16", "--gpus", "16"], "train.global_batch is 128"),
        (
            ["--overlay", "h100-8x", "--gpus", "4"],
            "--gpus (ranks per pod) is 4, but overlay h100-8x",
        ),
        (["--overlay", "cpu-smoke", "--nodes", "3"], "--nodes is 3, but overlay cpu-smoke"),
        (["train.device=cpu", "--gpus", "2"], "train.device is cpu, but --gpus is 2"),
        (["train.device=cuda", "--gpus", "0"], "train.device is cuda, but --gpus is 0"),
        (["--overlay", "cpu-smoke"], "--gpus is 1, but overlay cpu-smoke is written for 0"),
        (["run=runs/../../etc/x"], "run is runs/../../etc/x (/work/runs/../../etc/x in the pods"),
        (["data.shards=shards/../x"], "data.shards is shards/../x"),
        (["data.shards=/var/run/secrets/kway/x"], "data.shards is /var/run/secrets/kway/x"),
        (["data.shards=/tmp/x"], "no claim is mounted there"),
        ([FETCHED, "data.cache.folder=shards/c"], "no writable volume is mounted there"),
        ([FETCHED, "data.cache.folder=/data/c"], "data.cache.folder is /data/c"),
        (["data.stream={shards: '/a/{0..9}.tar', samples: 9}"], "data.stream.shards is /a"),
        (["data.mixture=[{shards: /data/x}]"], "data.mixture.0.shards is /data/x"),
        (["run=/var/run/x"], "run is /var/run/x (/var/run/x in the pods of overlay job)"),
        (["run=shards/x"], "no writable claim is mounted there"),
        (["data.shards=/data/x"], "data.shards is /data/x"),
        (["--image", "kway"], "--image kway has no fixed tag"),
        (["--image", "http://reg/kway:1"], "--image http://reg/kway:1 is not a valid"),
        (["--image", "reg.example/KWAY:1"], "--image reg.example/KWAY:1 is not a"),
        (["--image", "reg/kway:-x"], "--image reg/kway:-x is not a valid image"),
        (["--storage-class", "A_b"], "--storage-class A_b is not a valid name"),
        (["--namespace", "A_b"], "--namespace A_b is not a valid name"),
        (["optimizer.lrr=1"], "optimizer"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_inconsistent_input_exits_with_2_and_a_one_line_error(kway_render, given, message):
    code, printed, line = kway_render(str(RECIPE), *given)
    assert (code, printed, line.count("\n")) == (2, "", 1)
    assert line.startswith("error: ")
    assert message in line
