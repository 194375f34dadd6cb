"""Renders the manifests of a server: a Deployment, a RayService or a KServe model.

kustomize builds the overlay `serving/KIND` unchanged. A kustomization between the overlay and
base/serving sets the arguments and the resources of a pod. Another one on top of the overlay sets
what depends on the kind, the gateway, the image and the namespace.
"""

from pathlib import Path
from typing import Any

import yaml

from launch.kubernetes.kustomize import (
    ALL_CLAIMS,
    Claims,
    copied,
    json_patch,
    render_tree,
    write,
)
from launch.kubernetes.objects import GPU
from launch.kubernetes.server import (
    FOLDER,
    ONLY_IN_THE_CLUSTER,
    TOKENS,
    Gateway,
    Server,
    arguments,
    check_options,
)

Patch = dict[str, Any]
_POD = "/spec/template/spec"
_WORKERS = "/spec/rayClusterConfig/workerGroupSpecs/0"


def render_server(
    server: Server,
    gateway: Gateway = ONLY_IN_THE_CLUSTER,
    *,
    image: str | None = None,
    namespace: str | None = None,
    claims: Claims = ALL_CLAIMS,
) -> str:
    """Render the overlay of the server's kind as YAML.

    Raises ValueError for options that contradict each other and for a bundle that is not on the
    claim, and FileNotFoundError if kustomize is not installed.
    """
    check_options(server, gateway)
    with copied() as folder:
        if server.kind != "rayservice":
            _fill_the_base(folder / "k8s" / "base", server)
        tree: dict[str, Any] = {
            "resources": [f"k8s/overlays/serving/{server.kind}"],
            "components": _components(server, gateway),
            "patches": [
                *_removed_claim(server),
                *_kind_patches(server),
                *_gateway_patches(server, gateway),
            ],
        }
        if server.token_file is not None:
            tree["secretGenerator"] = [_secret(folder, server.token_file)]
        return render_tree(
            folder,
            tree,
            needs_cuda=server.device == "cuda",
            image=image,
            namespace=namespace,
            claims=claims,
        )


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
    container = f"{_POD}/containers/0"
    operations = [
        {"op": "replace", "path": f"{container}/args", "value": arguments(server)},
        *_resources(container, server),
        *_removed_volumes(_POD, server),
    ]
    tree = {
        "resources": ["../serving-as-shipped"],
        "components": ["../../components/grpc"] if server.has_grpc else [],
        "patches": [json_patch("Deployment", operations)],
    }
    write(base / "serving", tree)


def _resources(container: str, server: Server) -> list[Patch]:
    """Return operations that set the resources of a container, which runs one replica."""
    amounts = {"cpu": str(server.cpus), "memory": server.memory_each}
    if server.device == "cuda":
        amounts[GPU.replace("/", "~1")] = "1"
    return [
        {"op": "add", "path": f"{container}/resources/{which}/{name}", "value": amount}
        for which in ("requests", "limits")
        for name, amount in amounts.items()
    ]


def _removed_volumes(pod: str, server: Server) -> list[Patch]:
    """Return operations that remove the volumes that the server does not need.

    All pods list `bundles` and then `tokens` first. The last one is removed first, because a
    removal shifts the later ones.
    """
    removed = [] if server.requires_tokens else [(1, "tokens")]
    removed += [(0, "bundles")] if server.is_in_image else []
    return [
        operation
        for index, name in removed
        for part in ("volumes", "containers/0/volumeMounts")
        for operation in (
            {"op": "test", "path": f"{pod}/{part}/{index}/name", "value": name},
            {"op": "remove", "path": f"{pod}/{part}/{index}"},
        )
    ]


def _removed_claim(server: Server) -> list[Patch]:
    if not server.is_in_image:
        return []
    about = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "bundles"}}
    return [{"patch": yaml.safe_dump({**about, "$patch": "delete"})}]


def _components(server: Server, gateway: Gateway) -> list[str]:
    names = ["incremental-upgrade"] if server.has_incremental_upgrade else []
    if gateway.host is not None:
        names.append("gateway")
        names += ["grpc-route"] if server.has_grpc else []
        names += ["envoy-gateway"] if gateway.has_limits else []
    return [f"k8s/components/{name}" for name in names]


def _kind_patches(server: Server) -> list[Patch]:
    least, most = server.replicas
    match server.kind:
        case "deployment":
            return [json_patch("HorizontalPodAutoscaler", _bounds("/spec", least, most))]
        case "kserve":
            predictor = "/spec/predictor"
            uri = {"op": "replace", "path": f"{predictor}/model/storageUri"}
            operations = [*_bounds(predictor, least, most), {**uri, "value": _address(server)}]
            return [json_patch("InferenceService", operations)]
        case "rayservice":
            return [json_patch("RayService", _ray_operations(server))]


def _bounds(above: str, least: int, most: int) -> list[Patch]:
    bounds = {"minReplicas": least, "maxReplicas": most}
    return [{"op": "replace", "path": f"{above}/{k}", "value": v} for k, v in bounds.items()]


def _address(server: Server) -> str:
    return f"pvc://{server.bundle.as_posix()}"


def _ray_operations(server: Server) -> list[Patch]:
    least, most = server.replicas
    pod = f"{_WORKERS}/template/spec"
    return [
        {"op": "replace", "path": "/spec/serveConfigV2", "value": _serve_config(server)},
        {"op": "replace", "path": f"{_WORKERS}/replicas", "value": least},
        *_bounds(_WORKERS, least, most),
        *_resources(f"{pod}/containers/0", server),
        *_removed_volumes(pod, server),
        *_removed_volumes("/spec/rayClusterConfig/headGroupSpec/template/spec", server),
    ]


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
    return config_file(str(FOLDER / server.path), config)


def _gateway_patches(server: Server, gateway: Gateway) -> list[Patch]:
    if server.has_incremental_upgrade:
        path = "/spec/upgradeStrategy/clusterUpgradeOptions/gatewayClassName"
        return [json_patch("RayService", [_replaced(path, gateway.gateway_class)])]
    if gateway.host is None:
        return []
    listeners = [f"/spec/listeners/{index}" for index in range(2 if server.has_grpc else 1)]
    of_gateway = [_replaced("/spec/gatewayClassName", gateway.gateway_class)]
    for listener in listeners:
        of_gateway.append(_replaced(f"{listener}/hostname", gateway.host))
        of_gateway.append(_replaced(f"{listener}/tls/certificateRefs/0/name", gateway.tls_secret))
    of_route = [_replaced("/spec/hostnames/0", gateway.host)]
    patches = [json_patch("GRPCRoute", of_route)] if server.has_grpc else []
    if server.kind == "rayservice":  # KubeRay creates this Service
        of_route.append(_replaced("/spec/rules/0/backendRefs/0/name", "kway-serve-svc"))
    return [json_patch("Gateway", of_gateway), json_patch("HTTPRoute", of_route), *patches]


def _replaced(path: str, value: str) -> Patch:
    return {"op": "replace", "path": path, "value": value}
