"""The PodMonitors of k8s/overlays/monitoring, checked against the pods of the other manifests."""

import subprocess
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring_files import needs_kubectl, of_kind
from tests.system.processes import ROOT

pytestmark = needs_kubectl


def templates(tree: Any) -> list[dict[str, Any]]:
    """Return all pod templates inside an object."""
    if isinstance(tree, list):
        return [found for item in tree for found in templates(item)]
    if not isinstance(tree, dict):
        return []
    if "containers" in tree.get("spec", {}):
        return [tree]
    return [found for value in tree.values() for found in templates(value)]


def pods(folder: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s" / folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return templates(list(yaml.safe_load_all(done.stdout)))


def monitor(name: str) -> dict[str, Any]:
    (found,) = (each for each in of_kind("PodMonitor") if each["metadata"]["name"] == name)
    return found["spec"]


def is_selected(pod: dict[str, Any], selector: dict[str, Any]) -> bool:
    labels = pod["metadata"].get("labels", {})
    absent = {each["key"] for each in selector.get("matchExpressions", ())}
    return selector["matchLabels"].items() <= labels.items() and not absent & labels.keys()


def port_names(pod: dict[str, Any]) -> set[str]:
    containers = pod["spec"]["containers"]
    return {port["name"] for container in containers for port in container.get("ports", [])}


@pytest.mark.parametrize(
    ("name", "folder", "num"),
    [
        ("kway-training", "base/training", 1),
        ("kway-serving", "overlays/serving/rayservice", 2),
        ("kway-servers", "overlays/serving/rayservice", 0),
        ("kway-servers", "overlays/serving/deployment", 1),
    ],
)
def test_pod_monitors_select_a_port_of_every_pod(name: str, folder: str, num: int) -> None:
    """This includes the workers of a Ray cluster, which serve while the head is down."""
    spec = monitor(name)
    selected = [pod for pod in pods(folder) if is_selected(pod, spec["selector"])]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert [endpoint["port"] in port_names(pod) for pod in selected] == [True] * num
