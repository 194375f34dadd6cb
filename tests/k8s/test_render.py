"""`kway k8s render`: a recipe and a size become manifests that agree, or one line says why not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.kubernetes import problems
from launch.kubernetes.kustomize import FOLDER
from launch.kubernetes.objects import jobs, option, words
from launch.kubernetes.render import Size, overlays, render
from tests.k8s.built import ROOT, needs_kustomize, one, refusals
from trainer.recipe import build_recipe, load_recipe

pytestmark = needs_kustomize
RECIPE = ROOT / "launch/recipes/glyphs.yaml"


def rendered(nodes: int, gpus: int, overlay: str, *overrides: str, **more: Any) -> list[Any]:
    recipe = load_recipe(RECIPE, overrides)
    return list(yaml.safe_load_all(render(recipe, Size(nodes, gpus), overlay=overlay, **more)))


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
    for amounts in container["resources"].values():
        assert amounts.get("nvidia.com/gpu") == (str(gpus) if gpus else None)
        assert amounts["cpu"] == "8"


def test_the_config_map_holds_the_recipe_with_its_overrides():
    manifests = rendered(2, 1, "job", "optimizer.lr=0.4", "head.loss={kind: batch_ce}")
    text = one(manifests, "ConfigMap")["data"]["recipe.yaml"]
    expected = load_recipe(RECIPE, ["optimizer.lr=0.4", "head.loss={kind: batch_ce}"])
    assert build_recipe(yaml.safe_load(text), origin="test") == expected


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
    assert list(yaml.safe_load_all(printed)) == rendered(3, 2, "job", "seed=3")


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
            "train.class_group is 4, 4 ranks, and there are 6",
        ),
        (["--nodes", "16", "--gpus", "16"], "train.global_batch is 128 and there are 256 ranks"),
        (["--overlay", "h100-8x", "--gpus", "4"], "--gpus (ranks a pod) is 4 and overlay h100-8x"),
        (["--overlay", "cpu-smoke", "--nodes", "3"], "--nodes is 3 and overlay cpu-smoke is made"),
        (["run=/var/run/x"], "run is /var/run/x, which is /var/run/x in the pods of overlay job"),
        (["run=shards/x"], "no claim to write to is mounted there"),
        (["data.shards=/data/x"], "data.shards is /data/x"),
        (["--image", "kway"], "--image kway has no fixed tag"),
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
