"""Renders the manifests of a server: a Deployment, a RayService or a KServe model.

kustomize builds the overlay `serving/KIND` unchanged. A kustomization between the overlay and
base/serving sets the arguments and the resources of a pod. Another one on top of the overlay sets
what depends on the kind, the gateway, and the settings of all overlays.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from data.option import Argument, Option, Supplied
from launch.kubernetes.kustomize import (
    GPU,
    DnsName,
    Settings,
    build_with,
    copied,
    json_patch,
    removed_claims,
    write,
)

Kind = Literal["deployment", "rayservice", "kserve"]
TOKENS = "/var/run/secrets/kway/tokens"
# The working folder of the pods, where the claim `bundles` is mounted, and the folder of bundles
# that are part of the image.
_FOLDER, _IN_IMAGE = PurePosixPath("/work"), PurePosixPath("/usr/share/kway")
_POD = "/spec/template/spec"
_RAY = "/spec/rayClusterConfig"
_WORKERS = f"{_RAY}/workerGroupSpecs/0"


@dataclass(frozen=True)
class Server:
    """A bundle and how to serve it. The fields define options of `kway k8s render serving`.

    replicas: minimum and maximum number of copies of the model, one per pod. Raises ValueError for
    options that contradict each other, and for a bundle that is not on a volume.
    """

    bundle: Annotated[Path, Argument(metavar="BUNDLE")] = Field(
        description="bundle folder: bundles/NAME, which the pods read from the claim `bundles`"
    )
    kind: Kind = Field(
        default="deployment",
        description="deployment: pods of `kway serve`; rayservice: a Ray cluster (KubeRay); "
        "kserve: an InferenceService",
    )
    replicas: Annotated[tuple[int, int], Supplied()] = (2, 4)
    device: Literal["cpu", "cuda"] = Field(
        default="cpu", description="cuda: one GPU for each copy of the model"
    )
    cpus: int = Field(default=2, ge=1, description="CPU cores for each copy of the model")
    memory: Annotated[str | None, Option(metavar="QUANTITY")] = Field(
        default=None,
        pattern=r"^\d+(\.\d+)?([kMGT]|[KMGT]i)?$",
        description="memory for each copy of the model, such as 6Gi; default: 4Gi, or 8Gi for a "
        "rayservice",
    )
    is_in_image: Annotated[bool, Option("--in-image")] = Field(
        default=False,
        description="the image contains the bundle, at /usr/share/kway/NAME; no claim is required",
    )
    requires_tokens: Annotated[bool, Option("--no-tokens", flag=False)] = Field(
        default=True, description="do not require tokens from clients"
    )
    token_file: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None,
        description="also print the Secret kway-tokens with the tokens in this file; default: the "
        "Secret must already exist",
    )
    has_grpc: Annotated[bool, Option("--grpc")] = Field(
        default=False, description="also serve the Open Inference Protocol over gRPC"
    )
    has_surge: Annotated[bool, Option("--surge/--no-surge")] = Field(
        default=True,
        description="no surge: an upgrade needs no room for more pods. A deployment stops one pod "
        "before it starts the next; a rayservice does not start a second Ray cluster",
    )
    allow_imports: Annotated[tuple[str, ...], Supplied()] = ()
    host: DnsName | None = Field(
        default=None,
        description="lowercase DNS name of the server; also print its routes and a Gateway with "
        "TLS, which uses the Secret kway-tls; default: the server is reachable only in the cluster",
    )
    gateway_class: DnsName = Field(
        default="envoy-gateway", description="GatewayClass of the Gateway, a lowercase DNS name"
    )
    has_limits: Annotated[bool, Option("--edge-limits/--no-edge-limits")] = Field(
        default=True,
        description="also print the policies of Envoy Gateway that limit rates and body sizes",
    )

    @model_validator(mode="after")
    def _check(self) -> "Server":
        if self.has_grpc and self.kind != "deployment":
            raise ValueError("--grpc requires --kind deployment")
        is_placed = self.host is not None or self.is_in_image or not self.has_surge
        if self.kind == "kserve" and is_placed:
            raise ValueError(
                "--host, --in-image and --no-surge do not apply to --kind kserve: KServe creates "
                "the route and the Deployment, and mounts the model"
            )
        if self.token_file is not None and not self.requires_tokens:
            raise ValueError("--token-file and --no-tokens contradict each other: omit one")
        parts = PurePosixPath(self.bundle).parts
        is_on_claim = parts[:1] == ("bundles",) and len(parts) > 1 and ".." not in parts
        if not (self.is_in_image or is_on_claim):
            raise ValueError(
                f"BUNDLE is {self.bundle}, but the claim bundles is mounted at {_FOLDER}/bundles: "
                "pass a relative path bundles/NAME, or --in-image if the image contains the bundle "
                f"at {_IN_IMAGE}/NAME"
            )
        return self

    @property
    def path(self) -> str:
        """The bundle's folder in the pods: absolute, or relative to their working folder."""
        return str(_IN_IMAGE / self.bundle.name if self.is_in_image else self.bundle)


def render_server(server: Server, settings: Settings) -> str:
    """Render the overlay of the server's kind as YAML. FileNotFoundError: kubectl is missing."""
    components = []
    if server.host is not None:
        components = ["gateway", *(["grpc-route"] if server.has_grpc else [])]
        components += ["envoy-gateway"] if server.has_limits else []
    claims = [removed_claims("bundles")] if server.is_in_image else []
    with copied() as folder:
        if server.kind != "rayservice":
            _fill_the_base(folder / "k8s" / "base", server)
        tree: dict[str, Any] = {
            "resources": [f"k8s/overlays/serving/{server.kind}"],
            "components": [f"k8s/components/{name}" for name in components],
            "patches": [*claims, *_kind_patches(server), *_gateway_patches(server)],
        }
        if server.token_file is not None:
            tree["secretGenerator"] = [_secret(folder, server.token_file)]
        return build_with(settings, folder, tree, needs_cuda=server.device == "cuda")


def _secret(folder: Path, token_file: Path) -> dict[str, Any]:
    """Write the files of the Secret kway-tokens. `metrics` is the token that Prometheus sends."""
    content = token_file.read_bytes()
    lines = [line.strip() for line in content.splitlines()]
    (folder / "tokens").write_bytes(content)
    (folder / "metrics").write_bytes(next(n for n in lines if n and not n.startswith(b"#")))
    # Without a hash in the name, so that new tokens do not restart the pods.
    options = {"disableNameSuffixHash": True}
    return {"name": "kway-tokens", "files": ["tokens", "metrics"], "options": options}


def _fill_the_base(base: Path, server: Server) -> None:
    """Wrap base/serving in a kustomization that the overlays then build on."""
    (base / "serving").rename(base / "serving-as-shipped")
    (base / "serving").mkdir()
    values = {f"{_POD}/containers/0/args": arguments(server), **_resources(_POD, server)}
    tree = {
        "resources": ["../serving-as-shipped"],
        "components": ["../../components/grpc"] if server.has_grpc else [],
        "patches": [json_patch("Deployment", values, _removed_volumes(_POD, server))],
    }
    write(base / "serving", tree)


def arguments(server: Server) -> list[str]:
    """Return the arguments of `kway serve` in the pod of base/serving."""
    line = [server.path, "--host", "0.0.0.0", "--port", "8000"]
    line += ["--no-ray", "--threads", str(server.cpus)]
    line += ["--token-file", TOKENS] if server.requires_tokens else ["--no-tokens"]
    line += ["--device", "cuda"] if server.device == "cuda" else []
    line += ["--grpc-port", "9000"] if server.has_grpc else []
    return [*line, *(word for name in server.allow_imports for word in ("--allow-import", name))]


def _resources(pod: str, server: Server) -> dict[str, Any]:
    """Return the resources of a pod that runs one replica."""
    memory = server.memory or ("8Gi" if server.kind == "rayservice" else "4Gi")
    amounts = {"cpu": str(server.cpus), "memory": memory}
    if server.device == "cuda":
        amounts[GPU] = "1"
    both = {"limits": amounts, "requests": dict(amounts)}
    return {f"{pod}/containers/0/resources": both}


def _removed_volumes(pod: str, server: Server) -> list[dict[str, Any]]:
    """Return operations that remove the volumes that the server does not need.

    All pods list `bundles` and then `tokens` first. The last one is removed first, because a
    removal shifts the later ones.
    """
    removed = [] if server.requires_tokens else [(1, "tokens")]
    removed += [(0, "bundles")] if server.is_in_image else []
    return [
        operation
        for index, name in removed
        for part in (f"{pod}/volumes/{index}", f"{pod}/containers/0/volumeMounts/{index}")
        for operation in (
            {"op": "test", "path": f"{part}/name", "value": name},
            {"op": "remove", "path": part},
        )
    ]


def _kind_patches(server: Server) -> list[dict[str, Any]]:
    def bounds(above: str) -> dict[str, Any]:
        names = (f"{above}/minReplicas", f"{above}/maxReplicas")
        return dict(zip(names, server.replicas, strict=True))

    match server.kind:
        case "deployment":
            patches = [json_patch("HorizontalPodAutoscaler", bounds("/spec"))]
            if not server.has_surge:
                rolling = {"maxUnavailable": 1, "maxSurge": 0}
                patches.append(json_patch("Deployment", {"/spec/strategy/rollingUpdate": rolling}))
            return patches
        case "kserve":
            uri = {"/spec/predictor/model/storageUri": f"pvc://{server.bundle.as_posix()}"}
            return [json_patch("InferenceService", {**uri, **bounds("/spec/predictor")})]
        case "rayservice":
            pod, head = f"{_WORKERS}/template/spec", f"{_RAY}/headGroupSpec/template/spec"
            values = {
                "/spec/serveConfigV2": _serve_config(server),
                f"{_WORKERS}/replicas": server.replicas[0],
                **bounds(_WORKERS),
                **_resources(pod, server),
            }
            if not server.has_surge:
                values["/spec/upgradeStrategy"] = {"type": "None"}
            removed = [*_removed_volumes(pod, server), *_removed_volumes(head, server)]
            return [json_patch("RayService", values, removed)]


def _serve_config(server: Server) -> str:
    from serving.config import ServingConfig
    from serving.on_ray import config_file

    least, most = server.replicas
    config = ServingConfig(
        host="0.0.0.0",
        replicas=least,
        max_replicas=None if least == most else most,
        device=server.device,
        threads=server.cpus,
        token_file=Path(TOKENS) if server.requires_tokens else None,
        allow_imports=server.allow_imports,
    )
    return config_file(str(_FOLDER / server.path), config)


def _gateway_patches(server: Server) -> list[dict[str, Any]]:
    if server.host is None:
        return []
    of_gateway: dict[str, Any] = {"/spec/gatewayClassName": server.gateway_class}
    for index in range(2 if server.has_grpc else 1):
        of_gateway[f"/spec/listeners/{index}/hostname"] = server.host
    of_route: dict[str, Any] = {"/spec/hostnames": [server.host]}
    patches = [json_patch("Gateway", of_gateway)]
    patches += [json_patch("GRPCRoute", of_route)] if server.has_grpc else []
    if server.kind == "rayservice":  # KubeRay creates this Service
        of_route["/spec/rules/0/backendRefs/0/name"] = "kway-serve-svc"
    return [*patches, json_patch("HTTPRoute", of_route)]
