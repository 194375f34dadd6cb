"""`kway k8s render`: a recipe and a size become manifests that agree, or one line says why not."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launch.kubernetes import problems
from launch.kubernetes.agreement import on_devices
from launch.kubernetes.objects import jobs, load, load_all, option, words
from launch.kubernetes.render import FOLDER, Claims, Size, overlays, render
from tests.k8s.built import ROOT, needs_kustomize, one, refusals
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
def test_pods_and_ranks_are_those_asked_for(overlay, nodes, gpus):
    manifests = rendered(nodes, gpus, overlay)
    assert [line for manifest in manifests for line in refusals(manifest)] == []
    assert problems(manifests) == []
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


def test_the_config_map_holds_the_recipe_with_its_overrides():
    manifests = rendered(2, 0, "job", "optimizer.lr=0.4", "head.loss={kind: batch_ce}")
    expected = load_recipe(RECIPE, ["optimizer.lr=0.4", "head.loss={kind: batch_ce}"])
    assert recipe_of(manifests) == expected


def recipe_of(manifests: list[Any]) -> Any:
    text = one(manifests, "ConfigMap")["data"]["recipe.yaml"]
    return build_recipe(load(text), origin="test")


@pytest.mark.parametrize("overlay", ["job", "jobset", "h100-8x"])
def test_pods_with_gpus_train_on_them_by_an_image_that_can(overlay):
    manifests = rendered(2, 8, overlay)
    assert recipe_of(manifests).train.device == "cuda"
    (job,) = jobs(manifests)
    assert {each["image"].rpartition("-")[2] for each in job.pod.containers} == {"cu130"}
    (job,) = jobs(rendered(2, 8, overlay, image="kway:1.2"))
    assert {each["image"] for each in job.pod.containers} == {"kway:1.2"}


def test_pods_without_gpus_train_as_the_recipe_says():
    assert recipe_of(rendered(2, 0, "job")).train.device == "auto"
    recipe = load_recipe(RECIPE, ["train.device=cpu"])
    assert on_devices(recipe, gpus=0) == recipe


@pytest.mark.parametrize("overlay", ["job", "trainjob"])
def test_claims_have_the_storage_class_or_are_left_out(overlay):
    kinds = [each["kind"] for each in rendered(2, 0, overlay)]
    named = rendered(2, 0, overlay, claims=Claims("fast.ssd"))
    claims = [each["spec"] for each in named if each["kind"] == "PersistentVolumeClaim"]
    assert [spec["storageClassName"] for spec in claims] == ["fast.ssd"] * 3
    left = [each["kind"] for each in rendered(2, 0, overlay, claims=Claims(printed=False))]
    assert left == [kind for kind in kinds if kind != "PersistentVolumeClaim"]


def test_a_cache_of_fetched_shards_may_be_scratch_or_a_claim():
    for folder in ("~/.cache/kway", "/tmp/cache", "runs/cache"):
        rendered(2, 0, "job", FETCHED, f"data.cache.folder={folder}")


def test_another_recipe_has_another_config_map():
    names = {
        one(rendered(2, 1, "jobset", f"seed={seed}"), "ConfigMap")["metadata"]["name"]
        for seed in (1, 2, 1)
    }
    assert len(names) == 2


@pytest.mark.parametrize("overlay", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("image", ["registry:5000/a/kway:1.2", f"kway@sha256:{'0' * 64}"])
def test_image_and_namespace_are_put_in(overlay, image):
    manifests = rendered(2, 1, overlay, image=image, namespace="ml")
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"ml"}
    (job,) = jobs(manifests)
    assert [container["image"] for container in job.pod.containers] == [image]


def test_an_image_of_any_registry_is_put_in():
    digest = "sha256:" + "a" * 64
    for image in ("ghcr.io/a/kway:1", "localhost:5000/a_b/kway:V1.2", f"k:1@{digest}"):
        (job,) = jobs(rendered(2, 0, "job", image=image))
        assert job.pod.containers[0]["image"] == image.replace(":1@", "@")


def test_every_overlay_trains_or_says_that_it_does_not():
    sizes = {"h100-8x": (2, 8), "cpu-smoke": (2, 0)}
    for overlay in overlays():
        nodes, gpus = sizes.get(overlay, (2, 1))
        if overlay in ("serving", "monitoring"):
            with pytest.raises(ValueError, match=f"overlay {overlay} trains nothing"):
                rendered(nodes, gpus, overlay)
        else:
            assert len(list(jobs(rendered(nodes, gpus, overlay)))) == 1


def test_the_files_of_kway_stay_as_they_are():
    before = {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    rendered(4, 8, "jobset")
    assert {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()} == before


@pytest.fixture
def kway_render(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Any:
    """`kway k8s render` with these words; its exit code, standard output and error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = kway("k8s", "render", *arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_the_command_prints_what_render_gives(kway_render):
    code, printed, said = kway_render(str(RECIPE), "seed=3", "--nodes", "3", "--gpus", "2")
    assert (code, said) == (0, "")
    assert load_all(printed) == rendered(3, 2, "job", "seed=3")


def test_without_kustomize_one_line_says_what_to_install(kway_render, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, printed, said = kway_render(str(RECIPE))
    assert (code, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith("error: neither kubectl nor kustomize is on PATH: install")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--overlay", "h100"], "--overlay h100 is not known: choose one of cpu-smoke, "),
        (
            ["train.class_group=4", "--gpus", "3"],
            "train.class_group is 4 (4 ranks), which does not divide the 6 ranks",
        ),
        (["--nodes", "16", "--gpus", "16"], "train.global_batch is 128 and there are 256 ranks"),
        (["--overlay", "h100-8x", "--gpus", "4"], "--gpus (ranks a pod) is 4 and overlay h100-8x"),
        (["--overlay", "cpu-smoke", "--nodes", "3"], "--nodes is 3 and overlay cpu-smoke is made"),
        (["train.device=cpu", "--gpus", "2"], "train.device is cpu and --gpus 2"),
        (["train.device=cuda", "--gpus", "0"], "train.device is cuda and --gpus 0"),
        (["--overlay", "cpu-smoke"], "--gpus is 1 and overlay cpu-smoke is made for 0"),
        (["--gpus", "17"], "metrics are at ports 9400 to 9416"),
        (["run=runs/../../etc/x"], "run is runs/../../etc/x, which is /work/runs/../../etc/x"),
        (["data.shards=shards/../x"], "data.shards is shards/../x"),
        (["data.shards=/var/run/secrets/kway/x"], "data.shards is /var/run/secrets/kway/x"),
        (["data.shards=/tmp/x"], "no claim is mounted there"),
        ([FETCHED, "data.cache.folder=shards/c"], "no volume to write to is mounted there"),
        ([FETCHED, "data.cache.folder=/data/c"], "data.cache.folder is /data/c"),
        (["data.stream={shards: '/a/{0..9}.tar', samples: 9}"], "data.stream.shards is /a"),
        (["run=/var/run/x"], "run is /var/run/x, which is /var/run/x in the pods of overlay job"),
        (["run=shards/x"], "no claim to write to is mounted there"),
        (["data.shards=/data/x"], "data.shards is /data/x"),
        (["--image", "kway"], "--image kway has no fixed tag"),
        (["--image", "http://reg/kway:1"], "--image http://reg/kway:1 names no image"),
        (["--image", "reg.example/KWAY:1"], "--image reg.example/KWAY:1 names no image"),
        (["--image", "reg/kway:-x"], "--image reg/kway:-x names no image"),
        (["--storage-class", "A_b"], "--storage-class A_b is no name"),
        (["--namespace", "A_b"], "--namespace A_b is no name"),
        (["optimizer.lrr=1"], "optimizer"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_what_does_not_fit_is_one_line_and_code_2(kway_render, given, said):
    code, printed, line = kway_render(str(RECIPE), *given)
    assert (code, printed, line.count("\n")) == (2, "", 1)
    assert line.startswith("error: ")
    assert said in line
