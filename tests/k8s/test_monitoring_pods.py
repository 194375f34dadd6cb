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
    return selector["matchLabels"].items() <= labels.items()


def port_names(pod: dict[str, Any]) -> set[str]:
    return {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", [])}


@pytest.mark.parametrize(
    ("name", "folder", "num"),
    [("kway-training", "base/training", 1), ("kway-serving", "overlays/serving", 2)],
)
def test_the_pods_of_every_template_are_scraped_at_a_port_that_they_have(
    name: str, folder: str, num: int
) -> None:
    """Workers of a Ray cluster, too: they answer, and can be scraped, while the head is down."""
    spec = monitor(name)
    chosen = [one for one in pods(folder) if is_chosen(one, spec["selector"])]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert [endpoint["port"] in port_names(pod) for pod in chosen] == [True] * num
