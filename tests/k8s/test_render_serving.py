"""`kway k8s render serving`: consistent manifests for a bundle, or a one-line error."""

import base64
import copy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from launch.kubernetes.kustomize import Claims
from launch.kubernetes.objects import GPU, by_name, environment, load, load_all, pods, words
from launch.kubernetes.server import ONLY_IN_THE_CLUSTER, Gateway, Kind, Server, arguments
from launch.kubernetes.serving import render_server
from serving.config import ServingConfig
from tests.k8s.built import ROOT, built, needs_kustomize, one, schema_errors
from tests.k8s.test_manifests import parameters
from tests.tiny_bundle import write

pytestmark = needs_kustomize
BUNDLE = Path("bundles/glyphs")
KINDS = get_args(Kind)
HOST = Gateway("kway.acme.org", "eg", "acme-tls")


def rendered(gateway: Gateway = ONLY_IN_THE_CLUSTER, **given: Any) -> list[Any]:
    return copy.deepcopy(_rendered(gateway, **given))


@cache
def _rendered(gateway: Gateway, *, claims: Claims = Claims(), **given: Any) -> list[Any]:  # noqa: B008
    return load_all(render_server(Server(**{"bundle": BUNDLE} | given), gateway, claims=claims))


def server_pods(manifests: list[Any]) -> list[Any]:
    """Return the pods that run replicas."""
    found = [pod for pod in pods(manifests) if "redis" not in pod.where]
    return [pod for pod in found if not pod.where.endswith("head")]


def command(manifests: list[Any]) -> dict[str, Any]:
    """Return the parameters that `kway serve` parses in the pod."""
    ((container,),) = (pod.containers for pod in server_pods(manifests))
    line = words(container)
    assert line[0] == "kway"
    found = parameters(line[1:])
    return {**found.pop("given", {}), **found}


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_render_the_shipped_overlay(kind):
    """The shipped RayService has a different minimum of replicas."""
    replicas = (1, 4) if kind == "rayservice" else (2, 4)
    made = rendered(kind=kind, replicas=replicas)
    assert by_object(made) == by_object(built(f"overlays/serving/{kind}"))


def by_object(manifests: list[Any]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_is_valid_and_has_the_requested_resources(kind, device):
    given = {"kind": kind, "device": device, "replicas": (1, 3), "cpus": 3, "memory": "5Gi"}
    manifests = rendered(**given)
    check(manifests)
    (pod,) = server_pods(manifests)
    (container,) = pod.containers
    for amounts in container["resources"].values():
        assert (amounts["cpu"], amounts["memory"]) == ("3", "5Gi")
        assert amounts.get(GPU) == ("1" if device == "cuda" else None)
    assert container["image"].endswith("-cu130") == (device == "cuda")


def check(manifests: list[Any]) -> None:
    assert [line for manifest in manifests for line in schema_errors(manifest)] == []


@pytest.mark.parametrize("kind", ["deployment", "kserve"])
def test_kway_serve_accepts_the_arguments(kind):
    more = {} if kind == "kserve" else {"has_grpc": True}
    manifests = rendered(
        kind=kind, replicas=(1, 3), device="cuda", allow_imports=("a.b:C",), **more
    )
    check(manifests)
    given = command(manifests)
    assert given["bundle"] == Path("/mnt/models" if kind == "kserve" else BUNDLE)
    assert (given["host"], given["port"], given["threads"]) == ("0.0.0.0", 8000, 2)
    assert given["no_ray"]
    assert (given["device"], given["allow_import"]) == ("cuda", ["a.b:C"])
    assert given["grpc_port"] == (9000 if more else None)
    assert str(given["token_file"]) == "/var/run/secrets/kway/tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_replicas_is_bounded(kind):
    manifests = rendered(kind=kind, replicas=(2, 7))
    bounds = {"minReplicas": 2, "maxReplicas": 7}
    match kind:
        case "deployment":
            assert bounds.items() <= one(manifests, "HorizontalPodAutoscaler")["spec"].items()
            assert "replicas" not in one(manifests, "Deployment")["spec"]
        case "kserve":
            assert bounds.items() <= one(manifests, "InferenceService")["spec"]["predictor"].items()
        case "rayservice":
            spec = one(manifests, "RayService")["spec"]
            (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
            assert {"replicas": 2, **bounds}.items() <= group.items()
            (application,) = load(spec["serveConfigV2"])["applications"]
            config = application["args"]["config"]
            assert (config["replicas"], config["max_replicas"]) == (2, 7)


def test_a_fixed_number_of_replicas_disables_rays_autoscaling():
    spec = one(rendered(kind="rayservice", replicas=(3, 3)), "RayService")["spec"]
    (application,) = load(spec["serveConfigV2"])["applications"]
    config = application["args"]["config"]
    assert (config["replicas"], config["max_replicas"]) == (3, None)


@pytest.mark.parametrize("kind", ["deployment", "rayservice"])
def test_a_bundle_in_the_image_needs_no_claim_and_no_secret(kind):
    manifests = rendered(
        kind=kind, bundle=Path("/data/glyphs"), is_in_image=True, requires_tokens=False
    )
    check(manifests)
    assert "bundles" not in by_name(manifests, "PersistentVolumeClaim")
    for pod in pods(manifests):
        if "redis" not in pod.where:
            assert not {"bundles", "tokens"} & pod.volumes.keys()
    if kind == "rayservice":
        (application,) = load(one(manifests, "RayService")["spec"]["serveConfigV2"])["applications"]
        assert application["args"]["bundle"] == "/usr/share/kway/glyphs"
        assert application["args"]["config"]["token_file"] is None
    else:
        given = command(manifests)
        assert given["bundle"] == Path("/usr/share/kway/glyphs")
        assert given["no_tokens"]
        assert given.get("token_file") is None


@pytest.mark.parametrize("kind", ["deployment", "rayservice"])
def test_the_gateway_has_tls_and_its_routes_reach_the_server(kind):
    manifests = rendered(HOST, kind=kind, replicas=(2, 2))
    check(manifests)
    gateway = one(manifests, "Gateway")["spec"]
    assert gateway["gatewayClassName"] == "eg"
    (listener,) = gateway["listeners"]
    assert (listener["hostname"], listener["protocol"]) == ("kway.acme.org", "HTTPS")
    assert listener["tls"]["certificateRefs"] == [{"name": "acme-tls"}]
    route = one(manifests, "HTTPRoute")["spec"]
    assert route["hostnames"] == ["kway.acme.org"]
    service = "kway-serve-svc" if kind == "rayservice" else "kway-serve"
    assert all(r["backendRefs"] == [{"name": service, "port": 8000}] for r in route["rules"])


def test_the_gateway_has_a_longer_timeout_than_the_server():
    (rule,) = one(rendered(HOST), "HTTPRoute")["spec"]["rules"]
    seconds = float(rule["timeouts"]["request"].removesuffix("s"))
    assert seconds > ServingConfig().request_timeout_seconds + 10


def test_the_gateway_has_the_body_limit_of_the_server():
    policy = one(rendered(HOST), "BackendTrafficPolicy")["spec"]
    mib = int(policy["requestBuffer"]["limit"].removesuffix("Mi"))
    assert mib * 2**20 == ServingConfig().max_body_bytes
    without = rendered(Gateway("kway.acme.org", has_limits=False))
    assert not {"BackendTrafficPolicy", "ClientTrafficPolicy"} & {m["kind"] for m in without}
    check(without)


def test_grpc_has_a_port_and_a_listener():
    manifests = rendered(HOST, has_grpc=True)
    check(manifests)
    ports = one(manifests, "Service")["spec"]["ports"]
    assert [(port["name"], port["port"]) for port in ports] == [("serve", 8000), ("grpc", 9000)]
    listeners = one(manifests, "Gateway")["spec"]["listeners"]
    assert [each["port"] for each in listeners] == [443, 9000]
    assert {each["hostname"] for each in listeners} == {"kway.acme.org"}
    (rule,) = one(manifests, "GRPCRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "kway-serve", "port": 9000}]
    (policy,) = (m for m in manifests if m["kind"] == "NetworkPolicy")
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "serve"}, {"port": "grpc"}]}]


def test_an_incremental_upgrade_uses_the_gateway_class():
    gateway = Gateway(gateway_class="eg")
    manifests = rendered(gateway, kind="rayservice", has_incremental_upgrade=True)
    check(manifests)
    strategy = one(manifests, "RayService")["spec"]["upgradeStrategy"]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    assert strategy["clusterUpgradeOptions"]["gatewayClassName"] == "eg"


def test_a_token_file_becomes_the_secret_that_pods_mount(tmp_path):
    file = tmp_path / "x"
    file.write_text(f"# one per line\n{'t' * 32}\n{'u' * 32}\n")
    file.chmod(0o600)
    text = render_server(Server(BUNDLE, token_file=file), namespace="ml")
    secret = one(load_all(text), "Secret")
    assert secret["metadata"] == {"name": "kway-tokens", "namespace": "ml"}
    assert base64.b64decode(secret["data"]["tokens"]) == file.read_bytes()
    assert base64.b64decode(secret["data"]["metrics"]) == b"t" * 32


def test_claims_have_the_storage_class_or_are_omitted():
    (claim,) = (each for each in rendered(claims=Claims("fast")) if is_claim(each))
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("bundles", "fast")
    assert not any(is_claim(each) for each in rendered(claims=Claims(printed=False)))


def is_claim(manifest: dict[str, Any]) -> bool:
    return bool(manifest["kind"] == "PersistentVolumeClaim")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a bundle, a damaged one, and token files."""
    made = tmp_path_factory.mktemp("render")
    write(made / BUNDLE)
    shutil.copytree(made / BUNDLE, made / "bundles/damaged")
    (made / "bundles/damaged/backbone.safetensors").write_bytes(b"x")
    (made / "tokens").write_text("short")
    (made / "tokens").chmod(0o600)
    return made


@pytest.fixture
def kway_render(
    kway: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    monkeypatch.chdir(folder)

    def run(*given: str) -> tuple[int, str, str]:
        code = kway("k8s", "render", "serving", *given)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_the_command_prints_the_output_of_render(kway_render):
    given = [str(BUNDLE), "--replicas", "3", "--grpc", "--host", HOST.host, "--gateway-class", "eg"]
    code, printed, errors = kway_render(*given, "--tls-secret", HOST.tls_secret)
    assert (code, errors) == (0, "")
    assert load_all(printed) == rendered(HOST, replicas=(3, 3), has_grpc=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["bundles/none"], "bundles/none"),
        (["bundles/damaged"], "bundles/damaged"),
        (["other/glyphs"], "BUNDLE is other/glyphs (/work/other/glyphs in the pods)"),
        (["bundles"], "pass a relative path bundles/NAME"),
        (["."], "pass a relative path bundles/NAME"),
        (["bundles/../x"], "pass a relative path bundles/NAME"),
        (["/work/bundles/x"], "pass a relative path bundles/NAME"),
        (["/x/none", "--in-image"], "/x/none"),
        (["bundles/glyphs", "--kind", "job"], "'job' is not one of"),
        (["bundles/glyphs", "--replicas", "4:2"], "--replicas '4:2'"),
        (["bundles/glyphs", "--replicas", "0"], "--replicas '0'"),
        (["bundles/glyphs", "--cpus", "0"], "--cpus"),
        (["bundles/glyphs", "--memory", "4GB"], "--memory: '4GB' is not a valid quantity"),
        (["bundles/glyphs", "--device", "tpu"], "'tpu' is not one of"),
        (["bundles/glyphs", "--host", "https://a.org"], "--host https://a.org is not a DNS name"),
        (["bundles/glyphs", "--host", "a.org:443"], "is not a DNS name"),
        (["bundles/glyphs", "--tls-secret", "A"], "--tls-secret A is not a valid name"),
        (["bundles/glyphs", "--gateway-class", "A"], "--gateway-class A is not a valid name"),
        (["bundles/glyphs", "--kind", "kserve", "--host", "a.org"], "--host does not apply"),
        (["bundles/glyphs", "--kind", "kserve", "--in-image"], "--in-image does not apply"),
        (["bundles/glyphs", "--kind", "rayservice", "--grpc"], "--grpc requires --kind"),
        (["bundles/glyphs", "--incremental-upgrade"], "requires --kind rayservice"),
        (
            ["bundles/glyphs", "--kind=rayservice", "--incremental-upgrade", "--host", "a.org"],
            "omit --host",
        ),
        (["bundles/glyphs", "--token-file", "none"], "--token-file none cannot be read"),
        (["bundles/glyphs", "--token-file", "tokens"], "must have 24 to 512"),
        (["bundles/glyphs", "--token-file", "tokens", "--no-tokens"], "contradict each other"),
        (["bundles/glyphs", "--image", "kway"], "--image kway has no fixed tag"),
        (["bundles/glyphs", "--namespace", "A_b"], "--namespace A_b is not a valid name"),
        (["bundles/glyphs", "--nodes", "2"], "--nodes"),
    ],
)
def test_inconsistent_input_exits_with_2_and_a_one_line_error(kway_render, given, message):
    code, printed, line = kway_render(*given)
    assert (code, printed, line.count("\n")) == (2, "", 1)
    assert line.startswith("error: ")
    assert message in line


def test_the_arguments_of_the_shipped_pod_are_the_defaults():
    deployment = one(built("base/serving"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == arguments(Server(BUNDLE))
    assert environment(container)["TMPDIR"] == "/tmp"


def test_the_image_has_the_version_of_kway():
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for kind in KINDS:
        for pod in server_pods(built(f"overlays/serving/{kind}")):
            assert [each["image"] for each in pod.containers] == [f"kway:{version}"]
