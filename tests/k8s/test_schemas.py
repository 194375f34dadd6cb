"""Every kustomization matches the published schemas, which detect mistakes."""

import copy

import pytest

from tests.k8s.manifests import FOLDERS, built, needs_kustomize, of_kind
from tests.k8s.schemas import schema_errors
from tests.k8s.test_render_serving import HOST, rendered

pytestmark = needs_kustomize
RAY_MODE = "spec/rayClusterConfig/authOptions/mode"
GATEWAY = "a Deployment with a Gateway"


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_match_their_schemas(folder):
    manifests = built(folder)
    assert manifests
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []


@pytest.mark.parametrize(
    ("folder", "kind", "path", "value", "message"),
    [
        ("job", "Job", "spec/completion", 2, "'completion' was unexpected"),
        ("jobset", "JobSet", "spec/failurePolicy/maxRestart", 3, "maxRestart"),
        ("serving/rayservice", "RayService", RAY_MODE, "tokens", "not one of"),
        ("monitoring", "PodMonitor", "spec/podMetricsEndpoints/0/interval", "15", "does not match"),
        # Rules in CEL.
        ("trainjob", "TrainingRuntime", "spec/mlPolicy/mpi", {}, "Only one of the policy"),
        (GATEWAY, "Gateway", "spec/listeners/1/name", "https", "must be unique"),
    ],
)
def test_a_schema_detects_the_mistake(folder, kind, path, value, message):
    with_gateway = folder == GATEWAY
    manifests = rendered(**HOST, has_grpc=True) if with_gateway else built(f"overlays/{folder}")
    manifest = tree = copy.deepcopy(of_kind(manifests, kind)[0])
    *above, last = path.split("/")
    for key in above:
        tree = tree[int(key) if key.isdecimal() else key]
    tree[last] = value
    lines = list(schema_errors(manifest))
    assert any(message in line for line in lines), lines
