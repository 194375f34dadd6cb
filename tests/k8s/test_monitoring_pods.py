"""The PodMonitors of k8s/overlays/monitoring, against the pods of the other manifests."""

import subprocess
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring_files import needs_kubectl, of_kind
from tests.system.processes import ROOT

pytestmark = needs_kubectl


def templates(tree: Any) -> list[dict[str, Any]]:
    """All pod templates below an object."""
    if isinstance(tree, list):
        return [found for one in tree for found in templates(one)]
    if not isinstance(tree, dict):
        return []
    if "containers" in tree.get("spec", {}):
        return [tree]
    return [found for one in tree.values() for found in templates(one)]


def pods(folder: str) -> list[dict[str, Any]]:
    made = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s" / folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return templates(list(yaml.safe_load_all(made.stdout)))


def monitor(name: str) -> dict[str, Any]:
    (found,) = (one for one in of_kind("PodMonitor") if one["metadata"]["name"] == name)
    return found["spec"]


def is_chosen(pod: dict[str, Any], selector: dict[str, Any]) -> bool:
    labels = pod["metadata"].get("labels", {})
    has_all = selector["matchLabels"].items() <= labels.items()
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "NotIn"
        has_all = has_all and labels.get(one["key"]) not in one["values"]
    return has_all


def port_names(pod: dict[str, Any]) -> set[str]:
    return {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}


@pytest.mark.parametrize(
    ("name", "folder"),
    [("kway-training", "base/training"), ("kway-serving", "overlays/serving")],
)
def test_one_template_s_pods_are_scraped_at_a_port_that_they_have(name: str, folder: str) -> None:
    spec = monitor(name)
    (pod,) = (one for one in pods(folder) if is_chosen(one, spec["selector"]))
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["port"] in port_names(pod)


def test_the_token_comes_from_a_secret() -> None:
    (endpoint,) = monitor("kway-serving")["podMetricsEndpoints"]
    authorization = endpoint["authorization"]
    assert authorization["type"] == "Bearer"
    assert authorization["credentials"].keys() == {"name", "key"}
