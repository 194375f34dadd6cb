"""Prunes a CustomResourceDefinition to the parts that the tests use.

`python -m tests.k8s.crds ORIGIN CRD.yaml` writes KIND.json, with ORIGIN (project, version, file) in
it. It omits descriptions and `status`. The fields of pods and containers accept anything, because
the tests validate them with the schemas of Kubernetes.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
# Fields with types of Kubernetes itself.
_OF_KUBERNETES = re.compile(
    "affinity|containers|dnsConfig|env|envFrom|ephemeralContainers|hostAliases|imagePullSecrets|"
    "initContainers|lifecycle|livenessProbe|metadata|ports|readinessProbe|readinessGates|"
    "resources|securityContext|startupProbe|tolerations|topologySpreadConstraints|volumeDevices|"
    "volumeMounts|volumes"
)
# Parts of KServe's services that kway does not use, each with all fields of a pod.
_UNUSED = re.compile(
    "explainer|huggingface|lightgbm|onnx|paddle|pmml|predictive|pytorch|sklearn|tensorflow|"
    "transformer|triton|workerSpec|xgboost"
)
_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_NOT_USED = re.compile("description|externalDocs|format|title|x-kubernetes-(list|map)-.*")


def pruned(schema: Any, name: str = "") -> Any:
    """Return the schema of a field without what the tests do not use."""
    if isinstance(schema, list):
        return [pruned(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not _NOT_USED.fullmatch(key)}
    fields = schema.get("properties", {})
    is_pod = fields.keys() >= {"containers", "volumes", "restartPolicy"} and "model" not in fields
    if is_pod or (_OF_KUBERNETES.fullmatch(name) and "type" in schema):
        return {"type": schema["type"], **_OPEN}
    for key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "not"):
        if key in kept:
            kept[key] = pruned(kept[key])
    if fields:
        used = {key: value for key, value in fields.items() if not _UNUSED.fullmatch(key)}
        kept["properties"] = {key: pruned(value, key) for key, value in used.items()}
    return kept


if __name__ == "__main__":
    _origin, _path = sys.argv[1:]
    _crd = yaml.load(Path(_path).read_text(), yaml.CSafeLoader)["spec"]
    (_version,) = (each for each in _crd["versions"] if each["storage"])
    _schema = pruned(_version["schema"]["openAPIV3Schema"])
    _schema["properties"].pop("status", None)
    _whole = {
        "origin": f"{_origin}, Apache-2.0 (LICENSE)",
        "apiVersion": f"{_crd['group']}/{_version['name']}",
        "schema": _schema,
    }
    _text = json.dumps(_whole, separators=(",", ":"))
    (FOLDER / f"{_crd['names']['kind']}.json").write_text(_text + "\n")
