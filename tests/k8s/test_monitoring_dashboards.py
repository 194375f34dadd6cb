"""The dashboards of k8s/overlays/monitoring as far as they can be seen without a Grafana."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.monitoring_files import (
    dashboards,
    expressions,
    names_in,
    names_of_the_code,
    needs_kubectl,
    needs_promtool,
    of_kind,
    promtool,
)

pytestmark = needs_kubectl
NAMES = ["kway-serving.json", "kway-training.json"]


def panels(name: str) -> list[dict[str, Any]]:
    return dashboards()[name]["panels"]


def of_data(name: str) -> list[dict[str, Any]]:
    return [panel for panel in panels(name) if panel["type"] != "row"]


def test_each_dashboard_is_a_config_map_that_grafana_looks_for() -> None:
    maps = of_kind("ConfigMap")
    assert sorted(name for one in maps for name in one["data"]) == NAMES
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len({board["uid"] for board in dashboards().values()}) == len(NAMES)


@needs_promtool
@pytest.mark.parametrize("name", NAMES)
def test_every_expression_is_promql(name: str, tmp_path: Path) -> None:
    found = [one for of_panel in expressions(dashboards()[name]).values() for one in of_panel]
    rules = [{"record": f"panel:{place}", "expr": one} for place, one in enumerate(found)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "--lint=none", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(found)} rules found" in checked.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_of_a_panel_is_in_the_code(name: str) -> None:
    board = dashboards()[name]
    for panel, found in expressions(board).items():
        for one in found:
            assert names_in(one), panel
            assert names_in(one) <= names_of_the_code(), panel
    asked = [one["definition"] for one in board["templating"]["list"] if one["type"] == "query"]
    for one in asked:
        assert names_in(one) <= names_of_the_code()


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_of_the_code_has_a_panel(name: str) -> None:
    shown = {
        metric
        for found in expressions(dashboards()[name]).values()
        for one in found
        for metric in names_in(one)
    }
    of_training = name == "kway-training.json"
    known = {
        metric
        for metric in names_of_the_code()
        if metric.startswith("kway_train_") == of_training and not metric.endswith("_created")
    }
    # Where the run is in a step is for the alerts, steps and samples are there as rates; the exact
    # sum stands as kway_query_seconds_sum on the page.
    apart = {
        "kway_train_phase",
        "kway_train_steps_total",
        "kway_train_samples_total",
        "kway_query_exact_seconds",
    }
    assert known - shown <= apart


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_goes_by_the_variables(name: str) -> None:
    variables = [one["name"] for one in dashboards()[name]["templating"]["list"]]
    assert variables == ["datasource", "namespace", "job", "instance"]
    wanted = {'namespace=~"$namespace"', 'job=~"$job"', 'instance=~"$instance"'}
    for panel in of_data(name):
        for one in [panel, *panel["targets"]]:
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            selectors = re.findall(r"kway_\w+(?:\{([^}]*)\})?", target["expr"])
            assert all(wanted <= set(one.split(", ")) for one in selectors), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_has_a_unit_a_legend_and_words_about_it(name: str) -> None:
    for panel in of_data(name):
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            assert "{{job}}" in target["legendFormat"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_their_own_ids_and_places(name: str) -> None:
    ids = [panel["id"] for panel in panels(name)]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in panels(name)]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
