"""The objects of the Prometheus operator, against the fields that its API has: no other is taken.

Written by hand from prometheus-operator.dev/docs/api-reference/api (monitoring.coreos.com/v1), of
which a PodMonitor's fields are those that we use.
"""

import copy
from typing import Any

import jsonschema
import pytest

from tests.k8s.monitoring_files import needs_kubectl, of_kind

pytestmark = needs_kubectl
_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$", "minLength": 2}


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


_RULE = _closed(
    "alert expr labels annotations",
    alert=_TEXT,
    expr=_TEXT,
    labels=_TEXTS,
    annotations=_TEXTS,
    **{"for": _DURATION},
)
_SECRET = _closed("name key", name=_TEXT, key=_TEXT)
_ENDPOINT = _closed(
    "port",
    port=_TEXT,
    path=_TEXT,
    interval=_DURATION,
    authorization=_closed("credentials", type=_TEXT, credentials=_SECRET),
)
_EXPRESSION = _closed(
    "key operator",
    key=_TEXT,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values=_list(_TEXT),
)
SPECS = {
    "PrometheusRule": _closed(
        "groups",
        groups=_list(_closed("name rules", name=_TEXT, interval=_DURATION, rules=_list(_RULE))),
    ),
    "PodMonitor": _closed(
        "selector podMetricsEndpoints",
        jobLabel=_TEXT,
        selector=_closed("", matchLabels=_TEXTS, matchExpressions=_list(_EXPRESSION)),
        podMetricsEndpoints=_list(_ENDPOINT),
    ),
}


def check(one: dict[str, Any]) -> None:
    assert one["apiVersion"] == "monitoring.coreos.com/v1"
    jsonschema.validate(one["spec"], SPECS[one["kind"]])


@pytest.mark.parametrize("kind", SPECS)
def test_the_operator_takes_it(kind: str) -> None:
    found = of_kind(kind)
    assert len(found) == 2
    for one in found:
        check(one)


def test_a_wrong_field_or_type_is_seen() -> None:
    rule, pods = of_kind("PrometheusRule")[0], of_kind("PodMonitor")[0]
    for wrong in ({"expression": "up"}, {"for": 5}, {"labels": {"severity": 1}}):
        changed = copy.deepcopy(rule)
        changed["spec"]["groups"][0]["rules"][0].update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            check(changed)
    for wrong in ({"port": 9400}, {"bearer": "x"}, {"interval": "15"}):
        changed = copy.deepcopy(pods)
        changed["spec"]["podMetricsEndpoints"][0].update(wrong)
        with pytest.raises(jsonschema.ValidationError):
            check(changed)
