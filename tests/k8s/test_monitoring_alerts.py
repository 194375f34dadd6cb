"""Each alert of k8s/overlays/monitoring, tested with promtool: it fires exactly when it should."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring_files import (
    ROOT,
    alerts,
    groups,
    metric_names,
    names_in,
    needs_kubectl,
    needs_promtool,
    promtool,
)

pytestmark = needs_kubectl
CASES = {
    case["name"]: (path.name, case)
    for path in sorted((Path(__file__).parent / "monitoring").glob("*.yaml"))
    for case in yaml.safe_load(path.read_text())["tests"]
}
RUNBOOKS = ROOT / "docs/runbooks.md"
# The expected alerts.
WANTED = {
    "KwayTrainingStalled",
    "KwayTrainingGone",
    "KwayTrainingLossNotFinite",
    "KwayTrainingDataBound",
    "KwayTrainingRestarts",
    "KwayTrainingCheckpointTooOld",
    "KwayTrainingStraggler",
    "KwayServingGone",
    "KwayServingSlow",
    "KwayServingTooBusy",
    "KwayServingErrors",
    "KwayServingLossNotAligned",
    "KwayServingReloadFailed",
}


def write_rules(folder: Path, rules: list[dict[str, Any]]) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": rules}))
    return path


def test_all_expected_alerts_exist() -> None:
    assert {alert["alert"] for alert in alerts()} == WANTED


@needs_promtool
def test_the_rules_pass_promtool(tmp_path: Path) -> None:
    checked = promtool("check", "rules", write_rules(tmp_path, groups()))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(WANTED)} rules found" in checked.stdout


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_alerts_fire_as_expected(name: str, tmp_path: Path) -> None:
    file, case = CASES[name]
    checked = {check["alertname"] for check in case["alert_rule_test"]}
    selected = [
        {
            **group,
            "rules": [
                {**rule, "annotations": {"description": rule["annotations"]["description"]}}
                for rule in group["rules"]
                if rule["alert"] in checked
            ],
        }
        for group in groups()
    ]
    write_rules(tmp_path, selected)
    head = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s"}
    (tmp_path / file).write_text(yaml.safe_dump({**head, "tests": [case]}))
    tested = promtool("test", "rules", tmp_path / file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", sorted(WANTED))
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(alert: str) -> None:
    found = {
        bool(check["exp_alerts"])
        for _, case in CASES.values()
        for check in case["alert_rule_test"]
        if check["alertname"] == alert
    }
    assert found == {True, False}


def test_the_code_exports_every_metric_that_an_alert_uses() -> None:
    for alert in alerts():
        text = alert["expr"] + alert["annotations"]["description"]
        assert names_in(text), alert["alert"]
        assert names_in(text) <= metric_names(), alert["alert"]


def test_alerts_count_only_error_codes_with_their_http_status() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    by_status: dict[str, set[str]] = {}
    for status, code in re.findall(r'ApiError\(\s*(\d{3}), f?"([\w{}.]+)"', sources):
        by_status.setdefault(status, set()).add(code)
    for what in re.findall(r'ClientLimit\([^"]+"([\w ]+)"', sources):
        by_status["429"].add(f"too_many_{what}".replace(" ", "_"))
    for alert, status in {"KwayServingTooBusy": "429", "KwayServingErrors": "503"}.items():
        (expression,) = (rule["expr"] for rule in alerts() if rule["alert"] == alert)
        outcomes = set(re.findall(r'outcome=~"([\w|]+)"', expression)[0].split("|"))
        # `internal` counts unexpected exceptions of the server.
        assert outcomes - {"internal"} <= by_status[status], alert


def test_an_alert_has_severity_summary_description_and_runbook() -> None:
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert "{{ $labels.job }}" in alert["annotations"]["summary"]
        assert "$value" in alert["annotations"]["description"]
        anchor = f"#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"].endswith(f"docs/runbooks.md{anchor}")


def test_every_alert_has_exactly_one_runbook() -> None:
    titles = re.findall(r"^## (.+)$", RUNBOOKS.read_text(), flags=re.MULTILINE)
    assert len(titles) == len(set(titles))
    assert {title for title in titles if title.startswith("Kway")} == WANTED


@pytest.mark.parametrize("alert", sorted(WANTED))
def test_a_runbook_has_meaning_diagnosis_and_mitigation(alert: str) -> None:
    section = re.split(rf"^## {alert}$", RUNBOOKS.read_text(), flags=re.MULTILINE)[1]
    section = section.split("\n## ")[0]
    for part in ("**Meaning.**", "**Diagnosis.**", "**Mitigation.**"):
        assert section.count(part) == 1
    assert names_in(section) <= metric_names()
