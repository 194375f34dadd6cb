"""The objects for the Prometheus operator match its API and contain no unknown fields."""

import copy
from typing import Any

import pytest

from tests.k8s.built import schema_errors
from tests.k8s.monitoring_files import needs_kubectl, of_kind

pytestmark = needs_kubectl


@pytest.mark.parametrize(("kind", "num"), [("PrometheusRule", 2), ("PodMonitor", 3)])
def test_the_objects_match_the_schema_of_the_operator(kind: str, num: int) -> None:
    found = of_kind(kind)
    assert len(found) == num
    assert [line for manifest in found for line in schema_errors(manifest)] == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expression": "up"}, "'expression' was unexpected"),
        ({"for": 5}, "5 is not of type"),
        ({"for": "5"}, "does not match"),
        ({"expr": ""}, "non-empty"),
        ({"labels": {"severity": 1}}, "1 is not of type"),
        ({"alert": None}, "None is not of type"),
    ],
)
def test_an_invalid_alert_is_rejected(wrong: dict[str, Any], message: str) -> None:
    changed = copy.deepcopy(of_kind("PrometheusRule")[0])
    changed["spec"]["groups"][0]["rules"][0].update(wrong)
    assert any(message in line for line in schema_errors(changed)), list(schema_errors(changed))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 9400}, "9400 is not of type"),
        ({"bearer": "x"}, "'bearer' was unexpected"),
        ({"interval": "15"}, "does not match"),
        ({"scheme": "ftp"}, "not one of"),
        ({"authorization": {"type": "Bearer"}}, "'credentials' is a required"),
        ({"authorization": {"credentials": {"name": "a"}}}, "'key' is a required"),
    ],
)
def test_an_invalid_endpoint_is_rejected(wrong: dict[str, Any], message: str) -> None:
    changed = copy.deepcopy(of_kind("PodMonitor")[0])
    changed["spec"]["podMetricsEndpoints"][0].update(wrong)
    assert any(message in line for line in schema_errors(changed)), list(schema_errors(changed))


@pytest.mark.parametrize("needed", ["alert", "expr", "labels", "annotations"])
def test_an_alert_without_a_required_field_is_rejected(needed: str) -> None:
    changed = copy.deepcopy(of_kind("PrometheusRule")[0])
    del changed["spec"]["groups"][0]["rules"][0][needed]
    assert any(f"'{needed}' is a required" in line for line in schema_errors(changed))


def test_valid_fields_that_we_do_not_use_are_accepted() -> None:
    changed = copy.deepcopy(of_kind("PodMonitor")[0])
    changed["spec"]["podMetricsEndpoints"][0] |= {"scrapeTimeout": "10s", "scheme": "https"}
    assert list(schema_errors(changed)) == []
