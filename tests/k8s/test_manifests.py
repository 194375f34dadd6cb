"""The shipped manifests agree with the code: arguments, folders, images and configuration."""

import shutil
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
import yaml

from launch.kubernetes.kustomize import FOLDER, build
from launch.ranks.placement import Placement
from serving.config import ServingConfig
from serving.on_ray import variables
from tests.k8s.manifests import (
    ROOT,
    built,
    by_name,
    load_all,
    needs_kustomize,
    one,
    option,
    parameters,
    pods,
    words,
)
from tests.k8s.schemas import schema_errors
from tests.k8s.test_pods import FIXED_RANKS, GIVEN, RAY, TRAINING_FOLDERS, ray_service, trainer
from trainer.recipe import load_recipe

pytestmark = needs_kustomize
RECIPE = FOLDER / "base/training/recipe.yaml"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_shipped_recipe_is_the_glyphs_recipe():
    """It is a copy, because kustomize does not accept files outside its folder."""
    assert RECIPE.read_text() == (ROOT / "launch/recipes/glyphs.yaml").read_text()


@pytest.mark.parametrize("folder", TRAINING_FOLDERS)
def test_kway_train_accepts_the_arguments(folder):
    pod = trainer(folder)
    line = words(pod.main, GIVEN)
    options = parameters(["train", *line[4 if line[0] == "sh" else 2 :]])
    recipe = load_recipe(RECIPE, options["overrides"])
    assert (recipe.telemetry.host, recipe.telemetry.port) == ("0.0.0.0", 9400)
    assert recipe.train.duration.steps == (40 if "cpu-smoke" in folder else None)
    assert recipe.train.device == {"h100-8x": "cuda", "cpu-smoke": "cpu"}.get(folder[9:], "auto")
    same = ("rdzv_endpoint", "local_addr", "node_rank", "master_addr", "max_restarts")
    num_nodes = int(options["nnodes"])
    others = {name: options[name] for name in same}
    placement = Placement(int(options["nproc"]), num_nodes, num_nodes, **others)
    assert placement.is_static == (folder in FIXED_RANKS)
    assert placement.world_size == ("16" if "h100-8x" in folder else "2")


@pytest.mark.parametrize("index", ["0", "1"])
def test_only_pod_0_hosts_the_rendezvous(index, tmp_path):
    """Runs the shell script of the pod with a `kway` that prints its arguments."""
    shown = tmp_path / "kway"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$PPID" "$@"\n')
    shown.chmod(0o755)
    line = words(trainer("overlays/job").main)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": index}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=env) as done:
        parent, *printed = done.communicate(timeout=120)[0].splitlines()
    assert done.returncode == 0
    # The script replaces itself with kway, which therefore receives SIGTERM.
    assert int(parent) != done.pid
    host = "1" if index == "0" else "0"
    wanted = ["train", *line[4:], "--rdzv-conf", f"is_host={host},join_timeout=1800"]
    assert printed == wanted


@pytest.mark.parametrize("above", ["base/", "overlays/cpu-smoke/"])
def test_shards_training_export_and_serving_use_the_same_folders(above):
    recipe = load_recipe(RECIPE)
    (shards,), (export,) = pods(built(f"{above}shards")), pods(built(f"{above}export"))
    assert parameters(words(shards.main)[1:])["out"] == str(recipe.data.shards)
    evaluated, exported = (parameters(words(each)[1:]) for each in export.containers)
    assert evaluated["run"] == exported["run"] == recipe.run
    (application,) = yaml.safe_load(ray_service()["serveConfigV2"])["applications"]
    assert application["args"]["bundle"] == f"/work/{exported['out']}"


def test_ray_pods_use_the_tested_version_and_the_serving_environment():
    version = ray_service()["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text().split()
    for pod in (pod for pod in pods(built(RAY)) if pod.owner.startswith("RayService")):
        env = {entry["name"]: entry["value"] for entry in pod.main["env"]}
        assert variables(ServingConfig()).items() <= env.items()


def test_pods_use_the_image_of_this_version():
    for folder in (*TRAINING_FOLDERS, "base/shards", "base/export", RAY):
        images = {each["image"] for pod in pods(built(folder)) for each in pod.containers}
        of_kway = {image for image in images if "valkey" not in image}
        assert of_kway == {f"kway:{VERSION}" + ("-cu130" if "h100-8x" in folder else "")}


def test_the_small_overlays_fit_one_machine():
    """They are applied one after another and share their volume claims."""
    made = [built(f"overlays/cpu-smoke{name}") for name in ("", "/shards", "/export", "/serving")]
    first, *others = (by_name(each, "PersistentVolumeClaim") for each in made)
    assert all(claims.items() <= first.items() for claims in others)
    assert {tuple(each["spec"]["accessModes"]) for each in first.values()} == {("ReadWriteOnce",)}
    for pod in (pod for each in made for pod in pods(each)):
        assert all(each["resources"]["limits"]["cpu"] == "1" for each in pod.containers)


def test_an_installed_kway_contains_every_manifest():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "k8s" in settings["packages"]["find"]["include"]
    patterns = [pattern.rpartition("/")[2] for pattern in settings["package-data"]["k8s"]]
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert [path for path in files if not any(fnmatch(path.name, p) for p in patterns)] == []


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_components_can_be_combined(kind, tmp_path):
    """A machine type, a controller and a queue, as in docs/kubernetes.md."""
    shutil.copytree(FOLDER, tmp_path / "k8s")
    controller = [] if kind == "Job" else [kind.lower()]
    components = [f"k8s/components/{name}" for name in ("h100-8x", *controller, "kueue")]
    tree = {"resources": ["k8s/base/training"], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    manifests = load_all(build(tmp_path))
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []
    (pod,) = pods(manifests)
    assert pod.spec["hostNetwork"]
    assert option(words(pod.main), "--nproc") == "8"
    queued = one(manifests, kind)
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "kway"
