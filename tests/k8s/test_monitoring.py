"""The alerts and dashboards of k8s/overlays/monitoring, checked with promtool and with the names of
the metrics that the code exports."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from serving.metrics import METRICS
from tests.k8s.manifests import ROOT, built, needs_kustomize, of_kind
from trainer.telemetry.phases import Phases
from trainer.telemetry.prometheus import GAUGES, Metrics
from trainer.world import World

pytestmark = needs_kustomize
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="requires promtool: apt-get install prometheus"
)
CASES = {
    case["name"]: case
    for path in sorted((Path(__file__).parent / "monitoring").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text())["tests"]
}
RUNBOOKS = re.split(r"^## ", (ROOT / "docs/runbooks.md").read_text(), flags=re.MULTILINE)[1:]
BOARDS = ["kway-serving.json", "kway-training.json"]


def alerts() -> dict[str, dict[str, Any]]:
    rules = of_kind(built("overlays/monitoring"), "PrometheusRule")
    groups = [group for rule in rules for group in rule["spec"]["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def board(name: str) -> dict[str, Any]:
    maps = of_kind(built("overlays/monitoring"), "ConfigMap")
    (text,) = (each["data"][name] for each in maps if name in each["data"])
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in maps} == {"1"}
    return dict(json.loads(text))


def panels(name: str) -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def expressions(name: str) -> list[str]:
    """Return the expressions of all panels, with values for Grafana's variables."""
    found = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    filled = [each.replace("$__rate_interval", "20s") for each in found]
    return [re.sub(r"\$(namespace|job|instance)\b", ".*", each) for each in filled]


def promtool(folder: Path, rules: list[dict[str, Any]], *arguments: str) -> str:
    """Run promtool in a folder with these groups of rules in rules.yaml, and return its output."""
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bkway_\w+", text))


@cache
def metric_names() -> frozenset[str]:
    """Return the names of all metrics that the trainer and the server can export."""
    serving = {
        f"{metric.name}{end}"
        for metric in METRICS
        for end in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
    }
    cpu = torch.device("cpu")
    metrics = Metrics(World(0, 2, 0, 2, cpu, None), Phases(cpu), start_step=0, global_batch=4)
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    training = {sample.name for sample in samples} | {f"kway_train_{name}" for name in GAUGES}
    return frozenset(training | serving)


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_alerts_fire_as_expected(name, tmp_path):
    case = CASES[name]
    checked = {check["alertname"] for check in case["alert_rule_test"]}
    rules = [
        {**rule, "annotations": {"description": rule["annotations"]["description"]}}
        for alert, rule in alerts().items()
        if alert in checked
    ]
    head = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s"}
    (tmp_path / "case.yaml").write_text(yaml.safe_dump({**head, "tests": [case]}))
    promtool(tmp_path, [{"name": "alerts", "rules": rules}], "test", "rules", "case.yaml")


def test_every_alert_has_a_case_that_fires_and_one_that_does_not():
    checks = [check for case in CASES.values() for check in case["alert_rule_test"]]
    for alert in alerts():
        found = {bool(check["exp_alerts"]) for check in checks if check["alertname"] == alert}
        assert found == {True, False}, alert


def test_the_code_exports_every_metric_that_an_alert_uses():
    for name, alert in alerts().items():
        text = alert["expr"] + alert["annotations"]["description"]
        assert names_in(text), name
        assert names_in(text) <= metric_names(), name


def test_alerts_count_only_error_codes_with_their_http_status():
    sources = "\n".join(path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    by_status: dict[str, set[str]] = {}
    for status, code in re.findall(r'ApiError\(\s*(\d{3}), f?"([\w{}.]+)"', sources):
        by_status.setdefault(status, set()).add(code)
    for what in re.findall(r'(?:ClientLimit|super\(\).__init__)\([^"]+"([\w ]+)"', sources):
        by_status["429"].add(f"too_many_{what}".replace(" ", "_"))
    for alert, status in {"KwayServingTooBusy": "429", "KwayServingErrors": "503"}.items():
        found = re.findall(r'outcome=~"([\w|]+)"', alerts()[alert]["expr"])
        # `internal` counts unexpected exceptions of the server.
        assert {*found[0].split("|")} - {"internal"} <= by_status[status], alert


def test_every_alert_has_a_severity_a_summary_and_exactly_one_runbook():
    titles = [section.partition("\n")[0] for section in RUNBOOKS]
    assert sorted(titles) == sorted(alerts())
    for name, alert in alerts().items():
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert "{{ $labels.job }}" in alert["annotations"]["summary"]
        assert "$value" in alert["annotations"]["description"]
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
    for section in RUNBOOKS:
        for part in ("**Meaning.**", "**Diagnosis.**", "**Mitigation.**"):
            assert section.count(part) == 1, section
        assert names_in(section) <= metric_names(), section


@needs_promtool
@pytest.mark.parametrize("name", BOARDS)
def test_every_expression_is_valid_promql(name, tmp_path):
    found = enumerate(expressions(name))
    rules = [{"record": f"panel:{index}", "expr": each} for index, each in found]
    group = [{"name": "panels", "rules": rules}]
    printed = promtool(tmp_path, group, "check", "rules", "--lint=none", "rules.yaml")
    assert f"{len(rules)} rules found" in printed


@pytest.mark.parametrize("name", BOARDS)
def test_panels_show_exactly_the_metrics_that_the_code_exports(name):
    shown = [names_in(expression) for expression in expressions(name)]
    assert all(shown)
    of_training = name == "kway-training.json"
    known = {
        metric
        for metric in metric_names()
        if metric.startswith("kway_train_") == of_training and not metric.endswith("_created")
    }
    assert set.union(*shown) <= metric_names()
    # Only alerts use the current phase, and panels show steps and samples as rates.
    rates = {f"kway_train_{each}" for each in ("phase", "steps_total", "samples_total")}
    assert known - set.union(*shown) <= rates
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "query":
            assert names_in(variable["definition"]) <= metric_names()
