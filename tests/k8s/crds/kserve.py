"""Schemas of KServe's ServingRuntime (v1alpha1) and InferenceService (v1beta1), written by hand.

They contain only the fields that we use, in our own words. They were compared with KServe 0.20
(config/crd/full at aaac4e294dae). They are deliberately stricter than the CRDs: a service names its
runtime, its model is on a claim, and KServe creates an autoscaler.
"""

from tests.k8s.cel_rules import rules
from tests.k8s.crds.parts import COUNT, FLAG, INSIDE, NAME, STRINGS, TEXT, closed, resource

_OBJECTS = {"type": "array", "items": INSIDE, "minItems": 1}
_FORMAT = closed("name version", name=TEXT, version={"type": "string", "pattern": r"^\d+(\.\d+)*$"})
_SUPPORTED = {
    **_FORMAT,
    "properties": {**_FORMAT["properties"], "autoSelect": FLAG},
}
_PROTOCOL = {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}

_RUNTIME = closed(
    "supportedModelFormats protocolVersions containers",
    supportedModelFormats={"type": "array", "items": _SUPPORTED, "minItems": 1},
    protocolVersions={"type": "array", "items": _PROTOCOL},
    labels=STRINGS,
    containers={
        **_OBJECTS,
        **rules(
            (
                "self.exists_one(each, each.name == 'kserve-container')",
                "KServe requires a container named kserve-container",
            )
        ),
    },
    volumes=_OBJECTS,
)
_MODEL = closed(
    "modelFormat runtime storageUri",
    modelFormat=_FORMAT,
    protocolVersion=_PROTOCOL,
    runtime=NAME,
    storageUri={"type": "string", "pattern": "^pvc://[a-z0-9-]+/[^/].*$"},
)
_PREDICTOR = {
    **closed(
        "model minReplicas maxReplicas",
        model=_MODEL,
        minReplicas=COUNT,
        maxReplicas=COUNT,
        scaleMetric={"enum": ["cpu", "memory", "concurrency", "rps"]},
        scaleTarget=COUNT,
        automountServiceAccountToken=FLAG,
        enableServiceLinks=FLAG,
        securityContext=INSIDE,
        terminationGracePeriodSeconds=COUNT,
        topologySpreadConstraints=_OBJECTS,
    ),
    **rules(("self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas")),
}

KSERVE = {
    "ServingRuntime": resource("serving.kserve.io/v1alpha1", "ServingRuntime", _RUNTIME),
    "InferenceService": resource(
        "serving.kserve.io/v1beta1", "InferenceService", closed("predictor", predictor=_PREDICTOR)
    ),
}
