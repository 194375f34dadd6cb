"""Every kustomization matches the published schemas, which detect mistakes."""

import copy
from typing import Any

import pytest

from tests.k8s.manifests import FOLDERS, Manifest, built, needs_kustomize, of_kind
from tests.k8s.schemas import CRDS, defaulted, schema_errors
from tests.k8s.test_render_serving import HOST, rendered

pytestmark = needs_kustomize
POD = "spec/template/spec"
RAY = "spec/rayClusterConfig"
JOB, JOBSET, TRAINJOB = "overlays/job", "overlays/jobset", "overlays/trainjob"
SERVING, KSERVE = "overlays/serving/rayservice", "overlays/serving/kserve"
MONITORING, GATEWAY = "overlays/monitoring", "a Deployment with a Gateway"
ENDPOINT, ALERT = "spec/podMetricsEndpoints/0", "spec/groups/0/rules/0"


def first(folder: str, kind: str) -> Manifest:
    manifests = rendered(**HOST, has_grpc=True) if folder == GATEWAY else built(folder)
    return of_kind(manifests, kind)[0]


def changed(folder: str, kind: str, path: str, value: Any) -> Manifest:
    """Return a manifest with the value at a path such as `a/0/b` changed. None deletes it."""
    manifest = tree = copy.deepcopy(first(folder, kind))
    *above, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
    for key in above:
        tree = tree[key]
    if value is None:
        del tree[last]
    else:
        tree[last] = value
    return manifest


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_match_their_schemas(folder):
    manifests = built(folder)
    assert manifests
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []


@pytest.mark.parametrize(
    ("folder", "kind", "path", "value", "message"),
    [
        (JOB, "Job", "spec/completion", 2, "'completion' was unexpected"),
        (JOBSET, "JobSet", "spec/failurePolicy/maxRestart", 3, "maxRestart"),
        (SERVING, "RayService", f"{RAY}/authOptions/mode", "tokens", "not one of"),
        (KSERVE, "InferenceService", "spec/predictor/minReplica", 1, "unexpected"),
        (GATEWAY, "BackendTrafficPolicy", "spec/requestBuffer/limits", "32Mi", "unexpected"),
        (MONITORING, "PodMonitor", f"{ENDPOINT}/interval", "15", "does not match"),
        (MONITORING, "PrometheusRule", f"{ALERT}/for", 5, "not of type"),
        # Rules in CEL.
        (TRAINJOB, "TrainingRuntime", "spec/mlPolicy/mpi", {}, "Only one of the policy"),
        (GATEWAY, "Gateway", "spec/listeners/1/name", "https", "must be unique"),
    ],
)
def test_a_schema_detects_the_mistake(folder, kind, path, value, message):
    lines = list(schema_errors(changed(folder, kind, path, value)))
    assert any(message in line for line in lines), lines


def test_the_defaults_of_the_crds_are_set_before_the_rules_are_evaluated():
    listeners = [{"name": "a", "port": 80, "protocol": "HTTPS", "tls": {"certificateRefs": [{}]}}]
    gateway = {"spec": {"gatewayClassName": "x", "listeners": listeners}}
    (stored,) = defaulted(CRDS["Gateway"]["schema"], gateway)["spec"]["listeners"]
    assert stored["tls"]["mode"] == "Terminate"
    assert stored["allowedRoutes"] == {"namespaces": {"from": "Same"}}
