"""The objects of the Prometheus operator, against the fields that its API has, and no others."""

import copy
from typing import Any

import pytest

from tests.k8s.built import refusals
from tests.k8s.monitoring_files import needs_kubectl, of_kind

pytestmark = needs_kubectl


@pytest.mark.parametrize("kind", ["PrometheusRule", "PodMonitor"])
def test_the_operator_takes_it(kind: str) -> None:
    found = of_kind(kind)
    assert len(found) == 2
    assert [line for one in found for line in refusals(one)] == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"expression": "up"}, "'expression' was unexpected"),
        ({"for": 5}, "5 is not of type"),
        ({"for": "5"}, "does not match"),
        ({"expr": ""}, "non-empty"),
        ({"labels": {"severity": 1}}, "1 is not of type"),
        ({"alert": None}, "None is not of type"),
    ],
)
def test_a_wrong_alert_is_seen(wrong: dict[str, Any], said: str) -> None:
    changed = copy.deepcopy(of_kind("PrometheusRule")[0])
    changed["spec"]["groups"][0]["rules"][0].update(wrong)
    assert any(said in line for line in refusals(changed)), list(refusals(changed))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": 9400}, "9400 is not of type"),
        ({"bearer": "x"}, "'bearer' was unexpected"),
        ({"interval": "15"}, "does not match"),
        ({"scheme": "ftp"}, "not one of"),
        ({"authorization": {"type": "Bearer"}}, "'credentials' is a required"),
        ({"authorization": {"credentials": {"name": "a"}}}, "'key' is a required"),
    ],
)
def test_a_wrong_endpoint_is_seen(wrong: dict[str, Any], said: str) -> None:
    changed = copy.deepcopy(of_kind("PodMonitor")[0])
    changed["spec"]["podMetricsEndpoints"][0].update(wrong)
    assert any(said in line for line in refusals(changed)), list(refusals(changed))


@pytest.mark.parametrize("needed", ["alert", "expr", "labels", "annotations"])
def test_an_alert_says_all_of_it(needed: str) -> None:
    changed = copy.deepcopy(of_kind("PrometheusRule")[0])
    del changed["spec"]["groups"][0]["rules"][0][needed]
    assert any(f"'{needed}' is a required" in line for line in refusals(changed))


def test_fields_that_we_do_not_use_are_taken() -> None:
    changed = copy.deepcopy(of_kind("PodMonitor")[0])
    changed["spec"]["podMetricsEndpoints"][0] |= {"scrapeTimeout": "10s", "scheme": "https"}
    assert list(refusals(changed)) == []
