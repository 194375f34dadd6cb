"""Prunes a CustomResourceDefinition to the parts that the tests use.

`python -m tests.k8s.crds ORIGIN CRD.yaml` writes KIND.json, with ORIGIN (project, version, file) in
it, but without descriptions and `status`. Objects accept only the listed fields. The fields of pods
and containers accept anything, because the tests validate them with the schemas of Kubernetes.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
# Fields with types of Kubernetes itself, whose content is not kept.
_OF_KUBERNETES = re.compile(
    ".*[cC]ontainers|.*Probe|affinity|dnsConfig|env|envFrom|hostAliases|imagePullSecrets|lifecycle|"
    "metadata|ports|readinessGates|resources|securityContext|tolerations|topologySpread.*|"
    "volume(s|Mounts|Devices)"
)
# Documentation, and parts of KServe's services that kway does not use.
_OMITTED = re.compile(
    "description|externalDocs|format|title|x-kubernetes-(list|map)-.*|"
    "explainer|huggingface|lightgbm|onnx|paddle|pmml|predictive|pytorch|sklearn|tensorflow|"
    "transformer|triton|workerSpec|xgboost"
)
_OPEN = "x-kubernetes-preserve-unknown-fields"


def pruned(value: Any, name: str = "") -> Any:
    """Return a part of a schema without what the tests do not use, and with no other fields."""
    if isinstance(value, list):
        return [pruned(each) for each in value]
    if not isinstance(value, dict):
        return value.replace("^(?i)", "(?i)^") if name == "pattern" else value  # as in Python
    fields = value.get("properties", {})
    is_pod = fields.keys() >= {"containers", "volumes", "restartPolicy"} and "model" not in fields
    if is_pod or (_OF_KUBERNETES.fullmatch(name) and "type" in value):
        return {"type": value["type"], _OPEN: True}
    kept = {key: pruned(each, key) for key, each in value.items() if not _OMITTED.fullmatch(key)}
    if fields and value.get("type") == "object" and _OPEN not in value:
        kept["additionalProperties"] = False
    return kept


if __name__ == "__main__":
    _origin, _path = sys.argv[1:]
    _crd = yaml.load(Path(_path).read_text(), yaml.CSafeLoader)["spec"]
    (_version,) = (each for each in _crd["versions"] if each["storage"])
    _schema = pruned(_version["schema"]["openAPIV3Schema"])
    _schema["properties"].pop("status", None)
    _version_of = f"{_crd['group']}/{_version['name']}"
    _whole = {"origin": f"{_origin}, Apache-2.0", "apiVersion": _version_of, "schema": _schema}
    _text = json.dumps(_whole, separators=(",", ":"))
    (FOLDER / f"{_crd['names']['kind']}.json").write_text(_text + "\n")
