"""`kway k8s render serving`: consistent manifests for a bundle, or a one-line error."""

import base64
import contextlib
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from launch.kubernetes.kustomize import GPU, Settings
from launch.kubernetes.serving import Kind, Server, render_server
from serving.config import ServingConfig
from tests.k8s.manifests import (
    Pod,
    built,
    by_name,
    load_all,
    needs_kustomize,
    one,
    parameters,
    pods,
    words,
)
from tests.k8s.schemas import schema_errors
from tests.tiny_bundle import write

pytestmark = needs_kustomize
BUNDLE = Path("bundles/glyphs")
KINDS = get_args(Kind)
HOST = {"host": "kway.acme.org", "gateway_class": "eg"}
CLAIM = "PersistentVolumeClaim"


@cache
def rendered(**given: Any) -> list[Any]:
    """Return manifests that match their schemas. Do not change them."""
    manifests = load_all(render_server(Server(**{"bundle": BUNDLE} | given), Settings()))
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []
    return manifests


def server_pod(manifests: list[Any]) -> Pod:
    """Return the pod that runs replicas."""
    others = ("kway-redis", "head")
    (pod,) = (
        pod
        for pod in pods(manifests)
        if not pod.owner.endswith(others) and pod.labels.get("kway/ray-node") not in others
    )
    return pod


def command(manifests: list[Any]) -> dict[str, Any]:
    """Return the parameters that `kway serve` parses in the pod."""
    line = words(server_pod(manifests).main)
    assert line[0] == "kway"
    found = parameters(line[1:])
    return {**found.pop("given", {}), **found}


def ray_arguments(manifests: list[Any]) -> dict[str, Any]:
    text = one(manifests, "RayService")["spec"]["serveConfigV2"]
    (application,) = yaml.safe_load(text)["applications"]
    return dict(application["args"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_render_the_shipped_overlay(kind):
    """The shipped RayService has a different minimum of replicas."""

    def by_object(manifests: list[Any]) -> dict[tuple[str, str], Any]:
        return {(each["kind"], each["metadata"]["name"]): each for each in manifests}

    made = rendered(kind=kind, replicas=(1, 4) if kind == "rayservice" else (2, 4))
    assert by_object(made) == by_object(built(f"overlays/serving/{kind}"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_has_the_requested_resources(kind, device):
    pod = server_pod(rendered(kind=kind, device=device, replicas=(1, 3), cpus=3, memory="5Gi"))
    for amounts in pod.main["resources"].values():
        assert (amounts["cpu"], amounts["memory"]) == ("3", "5Gi")
        assert amounts.get(GPU) == ("1" if device == "cuda" else None)
    assert pod.main["image"].endswith("-cu130") == (device == "cuda")


@pytest.mark.parametrize("kind", ["deployment", "kserve"])
def test_kway_serve_accepts_the_arguments(kind):
    has_grpc = kind == "deployment"
    given = command(rendered(kind=kind, device="cuda", allow_imports=("a.b:C",), has_grpc=has_grpc))
    assert given["bundle"] == (BUNDLE if has_grpc else Path("/mnt/models"))
    assert (given["host"], given["port"], given["threads"]) == ("0.0.0.0", "8000", "2")
    assert given["no_ray"]
    assert (given["device"], given["allow_import"]) == ("cuda", ["a.b:C"])
    assert given["grpc_port"] == ("9000" if has_grpc else None)
    assert str(given["token_file"]) == "/var/run/secrets/kway/tokens"


def test_the_number_of_replicas_is_bounded():
    bounds = {"minReplicas": 2, "maxReplicas": 7}.items()
    manifests = rendered(replicas=(2, 7))
    assert bounds <= one(manifests, "HorizontalPodAutoscaler")["spec"].items()
    service = one(rendered(kind="kserve", replicas=(2, 7)), "InferenceService")["spec"]
    assert bounds <= service["predictor"].items()
    manifests = rendered(kind="rayservice", replicas=(2, 7))
    (group,) = one(manifests, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert bounds <= group.items()
    assert group["replicas"] == 2
    config = ray_arguments(manifests)["config"]
    assert (config["replicas"], config["max_replicas"]) == (2, 7)
    fixed = ray_arguments(rendered(kind="rayservice", replicas=(3, 3)))["config"]
    assert (fixed["replicas"], fixed["max_replicas"]) == (3, None)


@pytest.mark.parametrize("kind", ["deployment", "rayservice"])
def test_a_bundle_in_the_image_needs_no_claim_and_no_secret(kind):
    given = {"bundle": Path("/data/glyphs"), "is_in_image": True, "requires_tokens": False}
    manifests = rendered(kind=kind, **given)
    assert "bundles" not in by_name(manifests, CLAIM)
    for pod in pods(manifests):
        assert not {"bundles", "tokens"} & pod.volumes.keys()
    if kind == "rayservice":
        assert ray_arguments(manifests)["bundle"] == "/usr/share/kway/glyphs"
        assert ray_arguments(manifests)["config"]["token_file"] is None
    else:
        given = command(manifests)
        assert given["bundle"] == Path("/usr/share/kway/glyphs")
        assert given["no_tokens"]
        assert given.get("token_file") is None


@pytest.mark.parametrize("kind", ["deployment", "rayservice"])
def test_the_gateway_has_tls_and_a_longer_timeout_than_the_server(kind):
    manifests = rendered(**HOST, kind=kind)
    gateway = one(manifests, "Gateway")["spec"]
    assert gateway["gatewayClassName"] == "eg"
    (listener,) = gateway["listeners"]
    assert (listener["hostname"], listener["protocol"]) == ("kway.acme.org", "HTTPS")
    assert listener["tls"]["certificateRefs"] == [{"name": "kway-tls"}]
    route = one(manifests, "HTTPRoute")["spec"]
    assert route["hostnames"] == ["kway.acme.org"]
    (rule,) = route["rules"]
    service = "kway-serve-svc" if kind == "rayservice" else "kway-serve"
    assert rule["backendRefs"] == [{"name": service, "port": 8000}]
    seconds = float(rule["timeouts"]["request"].removesuffix("s"))
    assert seconds > ServingConfig().request_timeout_seconds + 10


def test_the_gateway_has_the_body_limit_of_the_server_or_no_limits():
    policy = one(rendered(**HOST), "BackendTrafficPolicy")["spec"]
    mib = int(policy["requestBuffer"]["limit"].removesuffix("Mi"))
    assert mib * 2**20 == ServingConfig().max_body_bytes
    without = rendered(**HOST, has_limits=False)
    assert not {"BackendTrafficPolicy", "ClientTrafficPolicy"} & {m["kind"] for m in without}


def test_grpc_has_a_port_and_a_listener():
    manifests = rendered(**HOST, has_grpc=True)
    ports = one(manifests, "Service")["spec"]["ports"]
    assert [(port["name"], port["port"]) for port in ports] == [("serve", 8000), ("grpc", 9000)]
    listeners = one(manifests, "Gateway")["spec"]["listeners"]
    assert [each["port"] for each in listeners] == [443, 9000]
    assert {each["hostname"] for each in listeners} == {"kway.acme.org"}
    (rule,) = one(manifests, "GRPCRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "kway-serve", "port": 9000}]
    opened = [{"ports": [{"port": "serve"}, {"port": "grpc"}]}]
    assert one(manifests, "NetworkPolicy")["spec"]["ingress"] == opened


def test_upgrades_start_a_second_cluster_or_pod_only_if_there_is_room():
    def rolling(**given: Any) -> Any:
        return one(rendered(**given), "Deployment")["spec"]["strategy"]["rollingUpdate"]

    def upgrade(**given: Any) -> Any:
        spec = one(rendered(kind="rayservice", **given), "RayService")["spec"]
        return spec.get("upgradeStrategy")

    assert rolling() == {"maxUnavailable": 0, "maxSurge": 1}
    assert rolling(has_surge=False) == {"maxUnavailable": 1, "maxSurge": 0}
    assert upgrade() is None  # KubeRay's default is a second cluster
    assert upgrade(has_surge=False) == {"type": "None"}


def test_a_token_file_becomes_the_secret_that_pods_mount(tmp_path):
    file = tmp_path / "x"
    file.write_text(f"# one per line\n{'t' * 32}\n{'u' * 32}\n")
    secret = one(rendered(token_file=file), "Secret")
    assert secret["metadata"] == {"name": "kway-tokens"}
    assert base64.b64decode(secret["data"]["tokens"]) == file.read_bytes()
    assert base64.b64decode(secret["data"]["metrics"]) == b"t" * 32


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working folder with a bundle, a damaged one, and a file with an invalid token."""
    made = tmp_path_factory.mktemp("render")
    write(made / BUNDLE)
    shutil.copytree(made / BUNDLE, made / "bundles/damaged")
    (made / "bundles/damaged/backbone.safetensors").write_bytes(b"x")
    (made / "tokens").write_text("short")
    (made / "tokens").chmod(0o600)
    with contextlib.chdir(made):
        yield


@pytest.mark.usefixtures("working_folder")
def test_the_command_prints_the_output_of_render(kway, capsys):
    given = ["serving", "bundles/glyphs", "--replicas", "3", "--grpc", "--no-surge"]
    given += ["--host", "kway.acme.org", "--gateway-class", "eg"]
    assert kway("k8s", "render", *given) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert load_all(printed) == rendered(**HOST, replicas=(3, 3), has_grpc=True, has_surge=False)


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bundles/damaged"], "bundles/damaged"),
        (["other/glyphs"], "BUNDLE is other/glyphs, but the claim bundles is mounted at"),
        (["bundles/../x"], "pass a relative path bundles/NAME"),
        (["bundles/glyphs", "--replicas", "4:2"], "--replicas is 4:2"),
        (
            ["bundles/glyphs", "--memory", "4GB"],
            "'--memory': pass the memory",
        ),
        (
            ["bundles/glyphs", "--host", "a.org:443"],
            "'--host': pass the lowercase DNS name of the server, got a.org:443",
        ),
        (["bundles/glyphs", "--kind", "kserve", "--host", "a.org"], "do not apply"),
        (["bundles/glyphs", "--kind", "rayservice", "--grpc"], "--grpc requires --kind"),
        (["bundles/glyphs", "--token-file", "none"], "--token-file none cannot be read"),
        (["bundles/glyphs", "--token-file", "tokens"], "must have 24 to 512"),
        (["bundles/glyphs", "--token-file", "tokens", "--no-tokens"], "contradict each other"),
    ],
)
def test_inconsistent_input_exits_with_2_and_a_one_line_error(error_of, given, message):
    assert message in error_of("k8s", "render", "serving", *given)
