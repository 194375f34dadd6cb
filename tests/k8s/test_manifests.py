"""Every base and overlay builds, matches its schemas, and is consistent with the code."""

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from typing import Any, get_args

import pytest
import yaml
from typer.main import get_command

from launch.kubernetes.kustomize import FOLDER, build
from launch.kubernetes.objects import environment, jobs, option, pods, quantity, words
from launch.kubernetes.server import Kind
from launch.main import app
from launch.ranks.placement import Placement
from serving.config import ServingConfig
from serving.on_ray import variables
from tests.k8s.built import FOLDERS, ROOT, built, needs_kustomize, one, schema_errors
from trainer.recipe import load_recipe

pytestmark = needs_kustomize
TRAINING = ("cpu-smoke", "h100-8x", "job", "jobset", "kueue", "trainjob")
RECIPE = FOLDER / "base/training/recipe.yaml"
# test_monitoring_schema.py checks the kinds of the Prometheus operator.
ELSEWHERE = ("PodMonitor", "PrometheusRule", "ServiceMonitor")


def test_all_bases_and_overlays_exist():
    serving = (f"serving/{kind}" for kind in get_args(Kind))
    assert {f"overlays/{name}" for name in (*TRAINING, *serving)} < set(FOLDERS)
    bases = ("claims", "training", "shards", "export", "serving")
    assert {f"base/{name}" for name in bases} < set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_match_their_schemas_and_rules(folder):
    manifests = built(folder)
    assert manifests
    known = [manifest for manifest in manifests if manifest["kind"] not in ELSEWHERE]
    assert [line for manifest in known for line in schema_errors(manifest)] == []


def test_the_shipped_recipe_is_the_glyphs_recipe():
    """It is a copy, because kustomize does not accept files outside its folder."""
    assert RECIPE.read_text() == (ROOT / "launch/recipes/glyphs.yaml").read_text()


def test_the_job_in_the_docs_handles_exit_codes_like_the_shipped_jobs():
    (block,) = re.findall(
        r"```yaml\n(apiVersion: batch/v1\n.*?)```",
        (ROOT / "docs/cluster.md").read_text(),
        re.DOTALL,
    )
    policy = yaml.safe_load(block)["spec"]["podFailurePolicy"]
    for folder in ("overlays/job", "overlays/cpu-smoke"):
        assert one(built(folder), "Job")["spec"]["podFailurePolicy"] == policy


@pytest.mark.parametrize("overlay", TRAINING)
def test_the_name_of_the_recipe_config_map_ends_with_a_content_hash(overlay):
    manifests = built(f"overlays/{overlay}")
    name = one(manifests, "ConfigMap")["metadata"]["name"]
    assert re.fullmatch(r"recipe-[a-z0-9]{10}", name)
    (pod,) = pods(manifests)
    assert pod.volumes["recipe"]["configMap"]["name"] == name


def parameters(line: list[str]) -> dict[str, Any]:
    """Return the parameters that `kway` parses from these arguments."""
    command, rest = get_command(app), list(line)
    while hasattr(command, "commands"):
        command = command.get_command(None, rest.pop(0))
    return dict(command.make_context("kway", rest).params)


def kway_lines(folder: str) -> list[list[str]]:
    """Return the arguments of `kway` in every container that runs it, with variables expanded."""
    given = {
        "POD_IP": "10.0.0.7",
        "JOB_COMPLETION_INDEX": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_PORT": "29400",
    }
    found = []
    for job in jobs(built(folder)):
        for container in job.pod.containers:
            line = words(container, {**given, **job.given})
            if line[0] == "sh":
                line = ["kway", "train", *line[4:]]
            assert line.pop(0) == "kway"
            found.append(line)
    return found


@pytest.mark.parametrize("overlay", TRAINING)
def test_kway_train_accepts_the_arguments(overlay):
    (line,) = kway_lines(f"overlays/{overlay}")
    assert not any("$" in word for word in line)
    given = parameters(line[:])
    recipe = load_recipe(RECIPE, given["overrides"])
    assert (recipe.telemetry.host, recipe.telemetry.port) == ("0.0.0.0", 9400)
    assert recipe.train.duration.steps == (40 if overlay == "cpu-smoke" else None)
    placement = Placement(
        num_processes=given["nproc"],
        min_nodes=int(given["nnodes"]),
        max_nodes=int(given["nnodes"]),
        rdzv_endpoint=given["rdzv_endpoint"],
        local_addr=given["local_addr"],
        node_rank=given["node_rank"],
        master_addr=given["master_addr"],
        max_restarts=given["max_restarts"],
    )
    assert placement.is_static == (overlay in ("jobset", "trainjob"))
    assert placement.world_size == ("16" if overlay == "h100-8x" else "2")


@pytest.mark.parametrize(
    "folder",
    [
        f"{above}{name}"
        for above in ("base/", "overlays/cpu-smoke/")
        for name in ("shards", "export")
    ],
)
def test_shards_training_and_export_use_the_same_folders(folder):
    recipe = load_recipe(RECIPE)
    lines = kway_lines(folder)
    if folder.endswith("shards"):
        assert str(parameters(lines[0])["out"]) == str(recipe.data.shards)
    else:
        evaluated, exported = (parameters(line) for line in lines)
        assert evaluated["run"] == exported["run"] == recipe.run
        assert served() == f"/work/{exported['out']}"


def served() -> str:
    """Return the folder from which the service loads the bundle."""
    service = one(built("overlays/serving/rayservice"), "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return str(application["args"]["bundle"])


# Run in a separate process, because importing Ray prints warnings.
_PRINT = """
import sys, yaml
from pathlib import Path
from ray.serve.schema import ServeDeploySchema
from serving.config import ServingConfig
from serving.on_ray import config_file
tokens = Path("/var/run/secrets/kway/tokens")
config = ServingConfig(host="0.0.0.0", replicas=1, max_replicas=4, threads=2, token_file=tokens)
text = config_file("/work/bundles/glyphs", config)
ServeDeploySchema.model_validate(yaml.safe_load(text))
print(text, end="")
"""


def test_the_service_config_is_the_output_of_kway_serve():
    printed = subprocess.run(
        [sys.executable, "-c", _PRINT],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    service = one(built("overlays/serving/rayservice"), "RayService")["spec"]
    assert service["serveConfigV2"] == printed.stdout
    config = yaml.safe_load(printed.stdout)["applications"][0]["args"]["config"]
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    assert group["minReplicas"] == config["replicas"]
    assert group["maxReplicas"] == config["max_replicas"]


def test_ray_pods_set_the_serving_environment():
    ray = [
        p for p in pods(built("overlays/serving/rayservice")) if p.where.startswith("RayService")
    ]
    assert len(ray) == 2
    for pod in ray:
        (container,) = pod.containers
        assert variables(ServingConfig()).items() <= environment(container).items(), pod.where


def test_the_manifests_use_the_tested_ray_version():
    cluster = one(built("overlays/serving/rayservice"), "RayService")["spec"]["rayClusterConfig"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()


def test_only_the_api_and_metrics_are_open_to_all():
    policies = [m for m in built("overlays/serving/rayservice") if m["kind"] == "NetworkPolicy"]
    open_ports = [
        port["port"]
        for policy in policies
        for rule in policy["spec"].get("ingress", ())
        if "from" not in rule
        for port in rule["ports"]
    ]
    assert open_ports == ["serve", "metrics"]


def test_the_operator_is_admitted_however_it_was_installed():
    """The Helm chart and the kustomize files of KubeRay use different pod labels."""
    (policy,) = [
        m for m in built("overlays/serving/rayservice") if m["metadata"]["name"] == "serving"
    ]
    dashboard = {"port": "dashboard"}
    (rule,) = [r for r in policy["spec"]["ingress"] if dashboard in r.get("ports", ())]
    names = [p["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for p in rule["from"]]
    assert names == ["kuberay-operator", "kuberay"]
    assert all(peer["namespaceSelector"] == {} for peer in rule["from"])


def test_gpu_pods_use_the_cuda_image():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (job,) = jobs(built("overlays/h100-8x"))
    (container,) = job.pod.containers
    assert container["image"] == f"kway:{version}-cu130"
    assert load_recipe(RECIPE, [words(container)[-1]]).train.device == "cuda"


def test_the_small_overlays_fit_one_machine():
    """They are applied one after another and share their volume claims."""
    folders = ["shards", "", "export", "serving"]
    claims = [
        {m["metadata"]["name"]: m["spec"] for m in made if m["kind"] == "PersistentVolumeClaim"}
        for made in (built(f"overlays/cpu-smoke/{folder}".rstrip("/")) for folder in folders)
    ]
    for specs in claims:
        assert specs.items() <= claims[0].items()
        assert "bundles" in specs
    assert all(spec["accessModes"] == ["ReadWriteOnce"] for spec in claims[0].values())
    for pod in pods(built("overlays/cpu-smoke/serving")):
        assert all(quantity(c["resources"]["limits"]["cpu"]) <= 1 for c in pod.containers)


def test_a_queued_run_is_suspended():
    job = one(built("overlays/kueue"), "Job")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "kway"
    assert job["spec"]["suspend"] is True


def test_secrets_are_mounted_as_files_and_are_not_in_the_repository():
    for folder in FOLDERS:
        manifests = built(folder)
        assert "Secret" not in {manifest["kind"] for manifest in manifests}
        for pod in pods(manifests):
            for container in pod.containers:
                for entry in container.get("env", ()):
                    assert "secretKeyRef" not in entry.get("valueFrom", {}), pod.where


def test_overlays_restart_ranks_either_inside_or_outside_the_pods():
    for overlay in TRAINING:
        (job,) = jobs(built(f"overlays/{overlay}"))
        (container,) = job.pod.containers
        line = words(container, job.given)
        outside = overlay in ("jobset", "trainjob")
        assert option(line, "--max-restarts") == ("0" if outside else "3"), overlay
        assert (option(line, "--master-addr") is not None) == outside, overlay


def test_an_installed_kway_contains_every_manifest():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "k8s" in settings["packages"]["find"]["include"]
    patterns = [pattern.rpartition("/")[2] for pattern in settings["package-data"]["k8s"]]
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert [path for path in files if not any(fnmatch(path.name, p) for p in patterns)] == []


@pytest.mark.parametrize("runs_it", ["jobset", "trainjob"])
def test_components_can_be_combined(runs_it, tmp_path):
    """A machine type, a controller and a queue, as in docs/kubernetes.md."""
    shutil.copytree(FOLDER, tmp_path / "k8s")
    joined = [f"k8s/components/{name}" for name in ("h100-8x", runs_it, "kueue")]
    tree = {"resources": ["k8s/base/training"], "components": joined}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(tree))
    manifests = list(yaml.safe_load_all(build(tmp_path)))
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []
    (job,) = jobs(manifests)
    assert job.pod.spec["hostNetwork"]
    assert option(words(job.pod.containers[0], job.given), "--nproc") == "8"
    (queued,) = [m for m in manifests if m["kind"] in ("JobSet", "TrainJob")]
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "kway"


@pytest.mark.parametrize("index", ["0", "1"])
def test_only_pod_0_hosts_the_rendezvous(index, tmp_path):
    """Runs the shell script of the pod with a `kway` that prints its arguments."""
    shown = tmp_path / "kway"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    (job,) = jobs(built("overlays/job"))
    line = words(job.pod.containers[0])
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": path, "JOB_COMPLETION_INDEX": index},
        timeout=120,
    )
    given = done.stdout.splitlines()
    assert given[0] == "train"
    host = "1" if index == "0" else "0"
    assert given[1:] == [*line[4:], "--rdzv-conf", f"is_host={host},join_timeout=1800"]
