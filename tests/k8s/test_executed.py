"""Runs the pods of the manifests on this machine, from writing shards to a query.

The pods use the commands, variables, mounts and names that kustomize renders. A Job handles a lost
pod according to its fields. The docstrings of pods, containers, volumes, job_controller and
ray_service in this folder state what is not emulated.
"""

import json
import re
import secrets
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.demo.queries import make_queries
from tests.k8s import ray_service
from tests.k8s.built import ROOT, built, needs_kustomize, one
from tests.k8s.cluster import cluster
from tests.k8s.job_controller import Job
from tests.k8s.ray_service import RayService
from tests.serving.started import ask
from tests.system.processes import KWAY
from tests.system.runs import losses, samples_by_step
from trainer.bundle.bundle import Bundle

pytestmark = [needs_kustomize, pytest.mark.slow]

SMOKE = "overlays/cpu-smoke"
# These values follow from the arguments of the overlay and its recipe. SAMPLES is per epoch.
STEPS, BATCH, SAMPLES, CLASSES = 40, 128, 5004, 100
SHARDS, RUN, BUNDLE = (f"claims/{name}/glyphs" for name in ("shards", "runs", "bundles"))
# Two pods, their replacements, and two more.
ADDRESSES = 6


def executed(folder: Path, overlay: str, disturb: Callable[[Job], None] | None = None) -> Job:
    """Run the Job of an overlay until it is complete. Its volume claims are in `folder`."""
    manifests = built(overlay)
    job_manifest = one(manifests, "Job")
    if overlay == SMOKE:  # so that the samples of each step can be counted
        (container,) = job_manifest["spec"]["template"]["spec"]["containers"]
        container["args"].append("telemetry.sample_ids=true")
    with cluster(folder, manifests, addresses=ADDRESSES) as made:
        job = Job(made, job_manifest)
        if disturb:
            disturb(job)
        job.run_to_end()
        assert job.condition == "Complete", f"{job}\n{made.logs}"
    return job


def after_a_checkpoint(folder: Path, act: Callable[[Job], None]) -> Callable[[Job], None]:
    def disturb(job: Job) -> None:
        def saved() -> bool:
            return any((folder / RUN).glob("checkpoints/*/manifest.json"))

        job.until(saved, "checkpoint", seconds=300)
        act(job)

    return disturb


def codes(job: Job) -> list[list[int | None]]:
    """Return the exit codes of the pods of each index, in order."""
    return [[pod.exit_code for pod in job.pods[index]] for index in sorted(job.pods)]


def check_the_run(run: Path, job: Job) -> None:
    """Check that each step ran once, that each sample was read once per epoch, and that the run was
    resumed."""
    logs = job.cluster.logs
    assert max(path.name for path in run.glob("checkpoints/*")) == f"step-{STEPS:08d}", logs
    assert list(losses(run)) == [1, *range(10, STEPS + 1, 10)], logs
    samples = samples_by_step(run)
    assert sorted(samples) == list(range(1, STEPS + 1)), logs
    assert {len(ids) for ids in samples.values()} == {BATCH}
    seen = Counter(sample for step in range(1, STEPS) for sample in samples[step])
    assert max(seen.values()) == 1
    assert len(seen.keys() | set(samples[STEPS])) == SAMPLES
    assert re.search(r"2 x cpu ddp; 40 steps of 128, from step [123]\d$", logs, re.MULTILINE), logs


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """A folder whose claim `shards` contains the glyphs."""
    folder = tmp_path_factory.mktemp("smoke")
    executed(folder, f"{SMOKE}/shards")
    return folder


@dataclass(frozen=True)
class Trained:
    folder: Path
    job: Job


@pytest.fixture(scope="module")
def trained(sharded) -> Trained:
    """A run whose second pod was killed after a checkpoint."""
    disturb = after_a_checkpoint(sharded, lambda job: job.pods[1][0].kill())
    return Trained(sharded, executed(sharded, SMOKE, disturb))


@pytest.fixture(scope="module")
def exported(trained) -> Trained:
    return Trained(trained.folder, executed(trained.folder, f"{SMOKE}/export"))


def test_a_run_survives_a_killed_pod(trained):
    job = trained.job
    assert codes(job) == [[0], [137, 0]], job.cluster.logs
    assert [action for _, action in job.verdicts] == ["Count"]
    check_the_run(trained.folder / RUN, job)


@pytest.mark.parametrize(
    ("act", "expected", "actions"),
    [
        # All pods are replaced, because pod 0 hosts the rendezvous.
        (lambda job: job.pods[0][0].kill(), [[137, 0], [1, 0]], {"Count"}),
        # The drained pod notifies the other one. Both save, and neither counts as a failure.
        (lambda job: job.pods[1][0].evict(), [[75, 0], [75, 0]], {"Ignore"}),
    ],
    ids=["the first pod is killed", "a pod is drained"],
)
def test_a_run_resumes_in_new_pods(act, expected, actions, sharded, tmp_path):
    shutil.copytree(sharded / SHARDS, tmp_path / SHARDS)
    job = executed(tmp_path, SMOKE, after_a_checkpoint(tmp_path, act))
    assert codes(job) == expected, job.cluster.logs
    assert {action for _, action in job.verdicts} == actions
    assert job.failures.total() == (2 if actions == {"Count"} else 0)
    check_the_run(tmp_path / RUN, job)


def test_the_export_evaluates_the_run_and_writes_a_bundle(exported):
    assert codes(exported.job) == [[0]]
    log = exported.job.pods[0][0].log
    assert log.splitlines()[-1] == "bundles/glyphs is ready: kway serve bundles/glyphs", log
    assert Bundle.open(exported.folder / BUNDLE).spec.num_classes == CLASSES


def test_the_serving_overlay_serves_the_bundle(exported, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{secrets.token_hex(32)}\n")
    tokens_secret = {"kind": "Secret", "metadata": {"name": "kway-tokens"}}
    manifests = built("overlays/serving/rayservice")
    manifests.append(tokens_secret | {"stringData": {"tokens": tokens.read_text()}})
    with cluster(exported.folder, manifests, addresses=2) as made:
        service = ray_service.start(made, one(manifests, "RayService"))
        service.deploy()
        service.wait_until_ready(service.workers[0])
        check_the_model(service, tmp_path)
        check_an_answer(service, exported.folder, tmp_path)
        # Ray uses shared memory and not the disk of the pod.
        assert "will harm performance" not in made.logs
        assert tokens.read_text().strip() not in made.logs


def forwarded(service: RayService, *words: str, folder: Path) -> str:
    """Run a command in the network of a worker, like `kubectl port-forward`; return its output."""
    inside = ["ip", "netns", "exec", service.workers[0].host.name]
    command = [*inside, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, f"{done.stderr}\n{service.cluster.logs}"
    return done.stdout


def check_the_model(service: RayService, folder: Path) -> None:
    """Check the curl command in docs/kubernetes.md, and that the API requires a token."""
    (line,) = re.findall(r"^ +\$ (curl .*)$", (ROOT / "docs/kubernetes.md").read_text(), re.M)
    command = f"{line} --silent --fail-with-body"
    model = json.loads(forwarded(service, "sh", "-c", command, folder=folder))
    assert (model["bundle"], model["num_classes"]) == ("glyphs", CLASSES)
    url = line.split()[-1]
    no_token = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", url]
    assert forwarded(service, *no_token, folder=folder) == "401"


def check_an_answer(service: RayService, made: Path, folder: Path) -> None:
    """Check that the server returns the same answer as the bundle without a server."""
    for query in make_queries(made / SHARDS, folder):
        about = ["--class", query.queried_class, str(query.image), "--recall", "0.9", "--json"]
        url, token = "http://127.0.0.1:8000", ["--token-file", str(folder / "tokens")]
        program = [*KWAY, "query", url, *token, *about]
        served = json.loads(forwarded(service, *program, folder=folder))
        alone = json.loads(ask(made / BUNDLE, *about))
        assert served == alone
