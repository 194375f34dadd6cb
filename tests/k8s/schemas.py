"""Validates manifests with published schemas: those of Kubernetes, and the CRDs in crds/.

Like an API server, it rejects unknown fields of a custom resource, sets the defaults, and evaluates
the CEL rules (`x-kubernetes-validations`). Jobs and pods inside a custom resource are validated as
objects of Kubernetes.
"""

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cel
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

Schema = dict[str, Any]
# The oldest version with a stable podFailurePolicy, a later one, and the newest version that
# kubernetes-validate supports.
KUBERNETES = ("1.31", "1.34", "1.37")
CRDS = {
    path.stem: json.loads(path.read_text())
    for path in Path(__file__).parent.glob("crds/*")
    if path.suffix == ".json"
}


def schema_errors(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the errors of a manifest against its schema. Raises an error for an unknown kind."""
    if (crd := CRDS.get(manifest["kind"])) is None:
        for version in KUBERNETES:
            validator = _of_kubernetes(manifest["kind"], manifest["apiVersion"], version)
            if (error := best_match(validator.iter_errors(manifest))) is not None:
                yield f"{error.json_path}: {error.message}"
        return
    if manifest["apiVersion"] != crd["apiVersion"]:
        yield f"apiVersion is {manifest['apiVersion']}, not {crd['apiVersion']}"
    errors = [*Draft202012Validator(crd["schema"]).iter_errors(manifest)]
    yield from (f"{error.json_path}: {error.message}" for error in errors)
    if not errors:
        yield from broken_rules(crd["schema"], defaulted(crd["schema"], manifest))
    for kind, spec in _inside(manifest):
        api = "batch/v1" if kind == "Job" else "v1"
        inner = {"spec": spec} if kind == "Job" else {"template": {"spec": spec}}
        yield from schema_errors(
            {"apiVersion": api, "kind": kind, "metadata": {"name": "inside"}, **inner}
        )


@cache
def _of_kubernetes(kind: str, api_version: str, version: str) -> Draft202012Validator:
    """Return the validator of `kubernetes_validate.validate(manifest, version, strict=True)`, which
    itself would read megabytes of definitions for each manifest."""
    folder, definitions = _definitions(version)
    group, _, name = api_version.rpartition("/")
    file = "-".join([kind.lower(), *filter(None, [group.partition(".")[0]]), name])
    schema = schema_contents(f"{folder}/{file}.json", version)
    return Draft202012Validator(schema, registry=definitions)


@cache
def _definitions(version: str) -> tuple[str, Registry]:
    """Return the folder with the newest schemas of a Kubernetes version, and its definitions."""
    newest = [each for each in all_versions() if major_minor(each) == version][-1]
    folder = f"kubernetes-json-schema/v{newest}-local-strict"
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    return folder, (Resource.from_contents(definitions) @ Registry()).crawl()


def defaulted(schema: Schema, value: Any) -> Any:
    """Return `value` as the server stores it: missing fields have the defaults of their schemas.

    A default inside a missing field does not create that field.
    """
    if isinstance(value, dict):
        filled = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in filled and "default" in field:
                filled[name] = copy.deepcopy(field["default"])
            if name in filled:
                filled[name] = defaulted(field, filled[name])
        return filled
    if isinstance(value, list):
        return [defaulted(schema.get("items", {}), item) for item in value]
    return value


def broken_rules(schema: Schema, value: Any, path: str = "$") -> Iterator[str]:
    """Yield the violated rules of a value that matches the schema and has its defaults."""
    for rule in schema.get("x-kubernetes-validations", ()):
        # Rules with oldSelf apply to changes of an object.
        if (
            "oldSelf" not in rule["rule"]
            and cel.evaluate(rule["rule"], {"self": value}) is not True
        ):
            yield f"{path}: {rule.get('message', rule['rule'])}"
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value:
                yield from broken_rules(field, value[name], f"{path}.{name}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from broken_rules(schema.get("items", {}), item, f"{path}[{index}]")


def _inside(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the specifications of Jobs and pods in a custom resource."""
    spec = manifest["spec"]
    match manifest["kind"]:
        case "JobSet" | "TrainingRuntime":
            of_set = spec["template"]["spec"] if "template" in spec else spec
            for replicated in of_set["replicatedJobs"]:
                yield "Job", replicated["template"]["spec"]
        case "ServingRuntime":
            yield "PodTemplate", {"containers": spec["containers"], "volumes": spec["volumes"]}
        case "InferenceService":
            of_kserve = {"model", "minReplicas", "maxReplicas", "scaleMetric", "scaleTarget"}
            pod = {key: value for key, value in spec["predictor"].items() if key not in of_kserve}
            yield "PodTemplate", {**pod, "containers": [{"name": "inside"}]}
        case "RayService":
            cluster = spec["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield "PodTemplate", group["template"]["spec"]
