"""The manifests of k8s/, each kustomization built once, and the pods and Jobs in them."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from launch.kubernetes.kustomize import CLAIM, FOLDER, YAML_LOADER, build
from launch.main import app

ROOT = Path(__file__).parents[2]
Manifest = dict[str, Any]


needs_kustomize = pytest.mark.skipif(not shutil.which("kubectl"), reason="requires kubectl")
FOLDERS = sorted(
    str(path.parent.relative_to(FOLDER))
    for path in FOLDER.rglob("kustomization.yaml")
    if path.parent.parent.name != "components"
)


def load_all(text: str) -> list[Manifest]:
    return list(yaml.load_all(text, YAML_LOADER))


@cache
def built(folder: str) -> list[Manifest]:
    """Return the manifests of a folder in k8s/. Do not change them."""
    return load_all(build(FOLDER / folder))


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def one(manifests: list[Manifest], kind: str) -> Manifest:
    """Return the only manifest of this kind."""
    (found,) = of_kind(manifests, kind)
    return found


def by_name(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in of_kind(manifests, kind)}


@dataclass(frozen=True)
class Pod:
    """A pod and what creates it. `job` is the specification of its Job, or empty."""

    owner: str
    spec: Manifest
    labels: dict[str, str]
    job: Manifest = field(default_factory=dict)

    @property
    def containers(self) -> list[Manifest]:
        """All containers, init containers first."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def main(self) -> Manifest:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def volumes(self) -> dict[str, Manifest]:
        return {volume["name"]: volume for volume in self.spec.get("volumes", ())}

    @property
    def ports(self) -> dict[str, int]:
        """The container ports by name."""
        ports = [port for each in self.containers for port in each.get("ports", ())]
        assert len({port["name"] for port in ports}) == len(ports), self.owner
        return {port["name"]: port["containerPort"] for port in ports}

    @property
    def trains(self) -> bool:
        return "kway train" in " ".join(self.main.get("command", ()))


def pods(manifests: list[Manifest]) -> list[Pod]:
    """Return the pods that the manifests start, without those of pods marked as local."""
    return [pod for manifest in manifests for pod in _pods(manifests, manifest)]


def _pods(manifests: list[Manifest], manifest: Manifest) -> Iterator[Pod]:
    kind, spec = manifest["kind"], manifest.get("spec", {})
    owner = f"{kind}/{manifest['metadata']['name']}"

    def pod(template: Manifest, job: Manifest | None = None) -> Pod:
        return Pod(owner, template["spec"], template["metadata"].get("labels", {}), job or {})

    match kind:
        case "Job" | "Deployment":
            yield pod(spec["template"], spec if kind == "Job" else None)
        case "JobSet" | "TrainingRuntime":
            of_set = spec["template"]["spec"] if kind == "TrainingRuntime" else spec
            for replicated in of_set["replicatedJobs"]:
                job = replicated["template"]["spec"]
                yield pod(job["template"], job)
        case "RayService":
            cluster = spec["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield pod(group["template"])
        case "InferenceService":
            yield _of_kserve(one(manifests, "ServingRuntime")["spec"], spec["predictor"], owner)


def _of_kserve(runtime: Manifest, predictor: Manifest, owner: str) -> Pod:
    """Return the pod that KServe creates, which mounts the model at /mnt/models."""
    claim = predictor["model"]["storageUri"].removeprefix("pvc://").partition("/")[0]
    (container,) = runtime["containers"]
    mount = {"name": "model", "mountPath": "/mnt/models", "readOnly": True}
    container = {**container, "volumeMounts": [*container["volumeMounts"], mount]}
    volume = {"name": "model", CLAIM: {"claimName": claim, "readOnly": True}}
    spec = {**predictor, "containers": [container], "volumes": [*runtime["volumes"], volume]}
    return Pod(owner, spec, runtime["labels"])


def words(container: Manifest, given: dict[str, str] | None = None) -> list[str]:
    """Return the command and its arguments, with the variables in `$(NAME)` expanded."""
    stated = {e["name"]: e["value"] for e in container.get("env", ()) if "value" in e}
    found = []
    for word in (*container.get("command", ()), *container.get("args", ())):
        for name, value in {**stated, **(given or {})}.items():
            word = word.replace(f"$({name})", value)
        found.append(word)
    return found


def option(line: list[str], name: str) -> str | None:
    """Return the argument that follows `name`, or None."""
    return dict(pairwise(line)).get(name)


def parameters(line: list[str]) -> dict[str, Any]:
    """Return the parameters that `kway` parses from these arguments."""
    command, rest = get_command(app), list(line)
    while hasattr(command, "commands"):
        command = command.get_command(None, rest.pop(0))
    return dict(command.make_context("kway", rest).params)
