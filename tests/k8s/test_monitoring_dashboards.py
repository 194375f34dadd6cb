"""The dashboards of k8s/overlays/monitoring, checked without Grafana."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring_files import (
    dashboards,
    expressions,
    metric_names,
    names_in,
    needs_kubectl,
    needs_promtool,
    of_kind,
    promtool,
)

pytestmark = needs_kubectl
NAMES = ["kway-serving.json", "kway-training.json"]


def panels(name: str) -> list[dict[str, Any]]:
    return dashboards()[name]["panels"]


def data_panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in panels(name) if panel["type"] != "row"]


def test_each_dashboard_is_a_config_map_with_the_grafana_label() -> None:
    maps = of_kind("ConfigMap")
    assert sorted(name for manifest in maps for name in manifest["data"]) == NAMES
    for manifest in maps:
        assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len({board["uid"] for board in dashboards().values()}) == len(NAMES)


@needs_promtool
@pytest.mark.parametrize("name", NAMES)
def test_every_expression_is_valid_promql(name: str, tmp_path: Path) -> None:
    found = list(itertools.chain.from_iterable(expressions(dashboards()[name]).values()))
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(found)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "--lint=none", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(found)} rules found" in checked.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_code_exports_every_metric_that_a_panel_uses(name: str) -> None:
    board = dashboards()[name]
    for panel, found in expressions(board).items():
        for expression in found:
            assert names_in(expression), panel
            assert names_in(expression) <= metric_names(), panel
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            assert names_in(variable["definition"]) <= metric_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_metric_has_a_panel(name: str) -> None:
    shown = {
        metric
        for found in expressions(dashboards()[name]).values()
        for expression in found
        for metric in names_in(expression)
    }
    of_training = name == "kway-training.json"
    known = {
        metric
        for metric in metric_names()
        if metric.startswith("kway_train_") == of_training and not metric.endswith("_created")
    }
    # Only alerts use the current phase, and panels show steps and samples as rates.
    not_shown = {
        "kway_train_phase",
        "kway_train_steps_total",
        "kway_train_samples_total",
    }
    assert known - shown <= not_shown


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_uses_the_variables(name: str) -> None:
    variables = [variable["name"] for variable in dashboards()[name]["templating"]["list"]]
    assert variables == ["datasource", "namespace", "job", "instance"]
    wanted = {'namespace=~"$namespace"', 'job=~"$job"', 'instance=~"$instance"'}
    for panel in data_panels(name):
        for item in [panel, *panel["targets"]]:
            assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            selectors = re.findall(r"kway_\w+(?:\{([^}]*)\})?", target["expr"])
            assert all(wanted <= set(each.split(", ")) for each in selectors), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_has_a_unit_a_legend_and_a_description(name: str) -> None:
    for panel in data_panels(name):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            assert "{{job}}" in target["legendFormat"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_unique_ids_and_do_not_overlap(name: str) -> None:
    ids = [panel["id"] for panel in panels(name)]
    assert len(ids) == len(set(ids))
    positions = [panel["gridPos"] for panel in panels(name)]
    for position in positions:
        assert position["x"] >= 0
        assert position["x"] + position["w"] <= 24
    for a, b in itertools.combinations(positions, 2):
        is_disjoint = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert is_disjoint, (a, b)
