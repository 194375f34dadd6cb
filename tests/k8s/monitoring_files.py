"""What k8s/overlays/monitoring renders to, and the names of the metrics that the code has."""

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from launch.kubernetes.objects import load_all
from tests.system.processes import ROOT
from trainer.telemetry.phases import PHASES, Phases
from trainer.telemetry.prometheus import _STEP_GAUGES, Metrics
from trainer.world import World

OVERLAY = ROOT / "k8s/overlays/monitoring"
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, for its kustomize"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


@cache
def rendered() -> list[dict[str, Any]]:
    """Every object of the overlay, as `kubectl apply` would get it."""
    made = subprocess.run(
        ["kubectl", "kustomize", str(OVERLAY)], capture_output=True, text=True, check=True
    )
    return load_all(made.stdout)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in rendered() if one["kind"] == kind]


def groups() -> list[dict[str, Any]]:
    return [group for rule in of_kind("PrometheusRule") for group in rule["spec"]["groups"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, Any]]:
    """File name -> dashboard."""
    files = {name: text for one in of_kind("ConfigMap") for name, text in one["data"].items()}
    return {name: json.loads(text) for name, text in files.items()}


def expressions(dashboard: dict[str, Any]) -> dict[str, list[str]]:
    """Panel's title and id -> its expressions, with values in the places of Grafana's variables."""
    return {
        f"{panel['title']} ({panel['id']})": [
            filled_in(target["expr"]) for target in panel["targets"]
        ]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }


def filled_in(expression: str) -> str:
    filled = expression.replace("$__rate_interval", "20s")
    return re.sub(r"\$(namespace|job|instance)\b", ".*", filled)


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkway_\w+", expression))


@cache
def names_of_the_code() -> frozenset[str]:
    """All that the trainer's and the server's metrics, told everything, would show."""
    # In a process of its own: importing Ray warns.
    asked = subprocess.run(
        [sys.executable, "-c", _OF_SERVING], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return frozenset(_names_of_training()) | frozenset(asked.stdout.split())


_OF_SERVING = """
from ray.serve.metrics import Histogram
from ray.util.metrics import Metric
from serving.deploy.metrics import HttpErrorMetrics, QueryMetrics, ReplicaMetrics, WatchMetrics
from trainer.bundle.spec import LossSpec
replica = ReplicaMetrics(LossSpec(kind="ce", aligned=False), lambda: (0, 0))
for told in QueryMetrics(), replica, WatchMetrics(), HttpErrorMetrics():
    for metric in filter(lambda one: isinstance(one, Metric), vars(told).values()):
        ends = "_bucket", "_sum", "_count"
        for end in ends if isinstance(metric, Histogram) else ("",):
            print(metric.info["name"] + end)
"""


def _names_of_training() -> set[str]:
    cpu = torch.device("cpu")
    metrics = Metrics(
        World(0, 2, 0, 2, cpu, None),
        start_step=0,
        num_steps=10,
        global_batch=4,
        restarts=0,
        checkpoint_every=5,
        phases=Phases(cpu),
    )
    numbers = dict.fromkeys(_STEP_GAUGES, 1.0)
    metrics.step(
        {**numbers, "phases": dict.fromkeys(PHASES, 1.0), "memory": {"resident": 1}},
    )
    metrics.busy([1.0, 2.0], {1: 2.0})
    metrics.event("checkpoint", {})
    metrics.event("evaluation", {"top1": 0.5})
    return _shown(metrics.registry)


def _shown(registry: CollectorRegistry) -> set[str]:
    return {sample.name for family in registry.collect() for sample in family.samples}
