"""Schemas of the Gateway API (v1) and of Envoy Gateway's policies (v1alpha1), written by hand.

They contain only the fields that we use, in our own words. They were compared with the CRDs of
Gateway API (config/crd/standard at 4564255ac2c3) and Envoy Gateway (charts/gateway-helm/charts/crds
at d32f28294245). They are deliberately stricter than the CRDs: a listener terminates TLS, and a
rule of a route has a name and a backend.
"""

from typing import Any

from tests.k8s.cel_rules import Schema, rules
from tests.k8s.crds.parts import COUNT, NAME, closed, resource

_HOST: Schema = {
    "type": "string",
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    "maxLength": 253,
}
_HOSTS = {"type": "array", "items": _HOST, "minItems": 1, "maxItems": 16}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_QUANTITY = {"type": "string", "pattern": "^[0-9]+([KMG]i)?$"}
_GATEWAY_API = "gateway.networking.k8s.io"


def _many(items: Schema, most: int, *own_rules: tuple[str, str]) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most, **rules(*own_rules)}


_LISTENER = closed(
    "name port protocol tls",
    name=NAME,
    hostname=_HOST,
    port=_PORT,
    protocol={"enum": ["HTTPS"]},
    tls=closed(
        "mode certificateRefs",
        mode={"enum": ["Terminate"]},
        certificateRefs=_many(closed("name", name=NAME), 64),
    ),
)
_LISTENERS = _many(
    _LISTENER,
    64,
    (
        "self.all(a, self.exists_one(b, a.name == b.name))",
        "names of listeners must be unique",
    ),
    (
        "self.all(a, self.exists_one(b, a.port == b.port && a.hostname == b.hostname))",
        "port and hostname of a listener must be unique",
    ),
)


def _route(kind: str, rule: Schema) -> Schema:
    spec = closed(
        "parentRefs rules",
        parentRefs=_many(closed("name sectionName", name=NAME, sectionName=NAME), 32),
        hostnames=_HOSTS,
        rules=_many(rule, 16),
    )
    return resource(f"{_GATEWAY_API}/v1", kind, spec)


_BACKENDS = _many(closed("name port", name=NAME, port=_PORT), 16)
_PATH = {
    **closed(
        "type value",
        type={"enum": ["Exact", "PathPrefix", "RegularExpression"]},
        value={"type": "string", "maxLength": 1024},
    ),
    **rules(
        ("self.value.startsWith('/')", "the value must start with /"),
        ("!self.value.contains('//') && !self.value.contains('/../')", "not a normalized path"),
    ),
}
_TIMEOUTS = closed("request", request=_DURATION)
_HTTP_RULE = closed(
    "name matches backendRefs",
    name=NAME,
    matches=_many(closed("path", path=_PATH), 64),
    timeouts=_TIMEOUTS,
    backendRefs=_BACKENDS,
)
_METHOD = closed("service", service={"type": "string", "pattern": r"^[A-Za-z_][A-Za-z_.0-9]*$"})
_GRPC_RULE = closed(
    "matches backendRefs",
    matches=_many(closed("method", method=_METHOD), 64),
    backendRefs=_BACKENDS,
)


def _targets(kind: str, required: str = "") -> Schema:
    target = closed(
        f"group kind name {required}",
        group={"const": _GATEWAY_API},
        kind={"const": kind},
        name=NAME,
        sectionName=NAME,
    )
    return _many(target, 16)


_CIDR = closed(
    "type value", type={"enum": ["Exact", "Distinct"]}, value={"type": "string", "format": "cidr"}
)
_RATE = closed(
    "clientSelectors limit",
    clientSelectors=_many(closed("sourceCIDR", sourceCIDR=_CIDR), 8),
    limit=closed(
        "requests unit",
        requests=COUNT,
        unit={"enum": ["Second", "Minute", "Hour", "Day", "Week", "Month", "Year"]},
    ),
)


def _envoy(kind: str, **fields: Any) -> Schema:
    return resource("gateway.envoyproxy.io/v1alpha1", kind, closed("targetRefs", **fields))


GATEWAYS = {
    "Gateway": resource(
        f"{_GATEWAY_API}/v1",
        "Gateway",
        closed("gatewayClassName listeners", gatewayClassName=NAME, listeners=_LISTENERS),
    ),
    "HTTPRoute": _route("HTTPRoute", _HTTP_RULE),
    "GRPCRoute": _route("GRPCRoute", _GRPC_RULE),
    "ClientTrafficPolicy": _envoy(
        "ClientTrafficPolicy",
        targetRefs=_targets("Gateway"),
        connection=closed(
            "connectionLimit", connectionLimit=closed("value", value={**COUNT, "minimum": 1})
        ),
        timeout=closed("http", http=closed("", requestHeadersReceivedTimeout=_DURATION)),
    ),
    "BackendTrafficPolicy": _envoy(
        "BackendTrafficPolicy",
        targetRefs=_targets("HTTPRoute", "sectionName"),
        requestBuffer=closed("limit", limit=_QUANTITY),
        rateLimit=closed("local", local=closed("rules", rules=_many(_RATE, 16))),
    ),
}
