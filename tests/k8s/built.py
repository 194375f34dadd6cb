"""Builds each kustomization of k8s/ once and validates the manifests."""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as models
import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

from launch.kubernetes.kustomize import FOLDER, build, kustomize_command
from launch.kubernetes.objects import load_all
from tests.k8s.cel_rules import broken_rules, defaulted
from tests.k8s.schemas import SCHEMAS


def _reason() -> str | None:
    try:
        kustomize_command()
    except FileNotFoundError as error:
        return str(error)
    return None


needs_kustomize = pytest.mark.skipif(_reason() is not None, reason=str(_reason()))

FOLDERS = sorted(
    str(path.parent.relative_to(FOLDER))
    for path in FOLDER.rglob("kustomization.yaml")
    if path.parent.parent.name != "components"
)
# The oldest version with a stable podFailurePolicy, and the newest version that kubernetes-validate
# supports.
KUBERNETES = ("1.31", "1.37")
# The models of kubeflow-trainer-api 2.3: Kubeflow Trainer 2.3 and the JobSet version that it uses.
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
# Fields of KServe's predictor that are fields of a pod.
_OF_PODS = (
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
)


@cache
def _built(folder: str) -> list[dict[str, Any]]:
    return load_all(build(FOLDER / folder))


def built(folder: str) -> list[dict[str, Any]]:
    """Return the manifests of a folder in k8s/, as a copy that the test may change."""
    return copy.deepcopy(_built(folder))


def one(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the only manifest of this kind."""
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def schema_errors(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the errors of a manifest against its schema. Raises KeyError for an unknown kind."""
    kind, group = manifest["kind"], manifest["apiVersion"].rpartition("/")[0]
    if "." not in group or (group.endswith(".k8s.io") and kind not in SCHEMAS):
        yield from _kubernetes_errors(manifest)
        return
    errors = list(Draft202012Validator(SCHEMAS[kind]).iter_errors(manifest))
    for error in errors:
        yield f"{error.json_path}: {error.message}"
    if not errors:
        yield from broken_rules(SCHEMAS[kind], defaulted(SCHEMAS[kind], manifest))
    yield from _model_errors(manifest)
    for inner in _inside(manifest):
        yield from _kubernetes_errors(inner)


def _kubernetes_errors(manifest: dict[str, Any]) -> Iterator[str]:
    """Validate like `kubernetes_validate.validate(manifest, version, strict=True)`."""
    for version in KUBERNETES:
        validator = _validator(manifest["kind"], manifest["apiVersion"], version)
        if (error := best_match(validator.iter_errors(manifest))) is not None:
            yield f"{error.json_path}: {error.message}"


@cache
def _validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """Return the cached validator of a kind.

    `kubernetes_validate` would read and index megabytes of definitions for each manifest.
    """
    group, _, name = api_version.rpartition("/")
    file = "-".join([kind.lower(), *filter(None, [group.partition(".")[0]]), name])
    schema = schema_contents(f"{_schemas(version)}/{file}.json", version)
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry:
    definitions = schema_contents(f"{_schemas(version)}/_definitions.json", version)
    return (Resource.from_contents(definitions) @ Registry()).crawl()


def _schemas(version: str) -> str:
    """Return the folder of the newest schemas of a Kubernetes version."""
    newest = [each for each in all_versions() if major_minor(each) == version][-1]
    return f"kubernetes-json-schema/v{newest}-local-strict"


def _model_errors(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the errors that a model raises, and the invalid fields that it ignores."""
    if (model := MODELS.get(manifest["kind"])) is None:
        return
    try:
        known = model.from_dict(manifest).to_dict()
    except ValueError as error:
        yield str(error)
        return
    yield from _ignored_fields(manifest, known, "$")


def _ignored_fields(given: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            if key not in known:
                yield f"{path}.{key} is not a field"
            else:
                yield from _ignored_fields(value, known[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, (value, other) in enumerate(zip(given, known, strict=True)):
            yield from _ignored_fields(value, other, f"{path}[{index}]")
    elif given != known:
        yield f"{path} is {given!r}, read as {known!r}"


def _inside(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the Jobs and pods in a custom resource as separate manifests."""
    spec = manifest["spec"]
    metadata = {"name": "inside"}
    job_set = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    for replicated in job_set.get("replicatedJobs", ()):
        job = replicated["template"]["spec"]
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}
    if manifest["kind"] == "ServingRuntime":
        pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
        yield _pod_template(pod)
    if manifest["kind"] == "InferenceService":
        predictor = spec["predictor"]
        shared = {key: predictor[key] for key in predictor if key in _OF_PODS}
        yield _pod_template({**shared, "containers": [{"name": "inside"}]})
    if manifest["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield _pod_template(**group["template"])


def _pod_template(spec: dict[str, Any], **more: Any) -> dict[str, Any]:
    template = {"spec": spec, **more}
    metadata = {"name": "inside"}
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template}


def set_at(tree: Any, path: str, value: Any) -> None:
    """Set the value at a JSON pointer such as `a/0/b` (~1: a slash in a key). None deletes it."""
    keys = [key.replace("~1", "/") for key in path.split("/")]
    *above, last = (int(key) if key.isdecimal() else key for key in keys)
    for key in above:
        tree = tree[key]
    if value is None:
        del tree[last]
    else:
        tree[last] = value


ROOT = Path(__file__).parents[2]
