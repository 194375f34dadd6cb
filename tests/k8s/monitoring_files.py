"""The rendered objects of k8s/overlays/monitoring, and the names of all exported metrics."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from launch.kubernetes.objects import load_all
from serving.metrics import METRICS
from tests.system.processes import ROOT
from trainer.telemetry.phases import PHASES, Phases
from trainer.telemetry.prometheus import _STEP_GAUGES, Metrics
from trainer.world import World

OVERLAY = ROOT / "k8s/overlays/monitoring"
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="requires kubectl, which includes kustomize"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="requires promtool: apt-get install prometheus"
)


@cache
def rendered() -> list[dict[str, Any]]:
    """Return every object of the overlay, as `kubectl apply` would receive it."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(OVERLAY)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return load_all(done.stdout)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in rendered() if manifest["kind"] == kind]


def groups() -> list[dict[str, Any]]:
    return [group for rule in of_kind("PrometheusRule") for group in rule["spec"]["groups"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name."""
    maps = of_kind("ConfigMap")
    files = {name: text for manifest in maps for name, text in manifest["data"].items()}
    return {name: json.loads(text) for name, text in files.items()}


def expressions(dashboard: dict[str, Any]) -> dict[str, list[str]]:
    """Return each panel's expressions by title and ID, with values for Grafana's variables."""
    return {
        f"{panel['title']} ({panel['id']})": [
            with_values(target["expr"]) for target in panel["targets"]
        ]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }


def with_values(expression: str) -> str:
    filled = expression.replace("$__rate_interval", "20s")
    return re.sub(r"\$(namespace|job|instance)\b", ".*", filled)


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bkway_\w+", expression))


@cache
def metric_names() -> frozenset[str]:
    """Return the names of all metrics that the trainer and the server can export."""
    serving = {
        f"{metric.name}{end}"
        for metric in METRICS
        for end in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
    }
    return frozenset(_training_names() | serving)


def _training_names() -> set[str]:
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
