"""The options of `kway k8s render serving`, and the command of the pods that follows from them."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from launch.kubernetes.kustomize import checked_name
from launch.kubernetes.objects import quantity

Kind = Literal["deployment", "rayservice", "kserve"]
TOKENS = "/var/run/secrets/kway/tokens"
GRPC_PORT = "9000"
_PORT = "8000"
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+")
# The working folder of the pods, where the claim `bundles` is mounted, and the folder of bundles
# that are part of the image.
FOLDER, _CLAIM, _IN_IMAGE = PurePosixPath("/work"), "bundles", PurePosixPath("/usr/share/kway")


@dataclass(frozen=True)
class Server:
    """A bundle and how to serve it.

    bundle: folder of the bundle. is_in_image: the bundle is part of the image instead of being on
    the claim. replicas: minimum and maximum number of copies of the model. cpus and memory: for
    each of them; memory None: the amount in the manifests. requires_tokens: whether clients must
    send one of the tokens in the Secret kway-tokens; token_file: file to create it from; None: it
    already exists.
    """

    bundle: Path
    kind: Kind = "deployment"
    replicas: tuple[int, int] = (2, 4)
    device: Literal["cpu", "cuda"] = "cpu"
    cpus: int = 2
    memory: str | None = None
    is_in_image: bool = False
    requires_tokens: bool = True
    token_file: Path | None = None
    has_grpc: bool = False
    has_incremental_upgrade: bool = False
    allow_imports: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The bundle's folder in the pods: absolute, or relative to their working folder."""
        return str(_IN_IMAGE / self.bundle.name if self.is_in_image else self.bundle)

    @property
    def memory_each(self) -> str:
        """Memory for each copy of the model."""
        return self.memory or ("8Gi" if self.kind == "rayservice" else "4Gi")


@dataclass(frozen=True)
class Gateway:
    """How clients outside the cluster reach the server.

    host: DNS name; None: they do not. tls_secret: Secret with the certificate. has_limits: add the
    limits of Envoy Gateway.
    """

    host: str | None = None
    gateway_class: str = "envoy-gateway"
    tls_secret: str = "kway-tls"
    has_limits: bool = True


ONLY_IN_THE_CLUSTER = Gateway()


def check_options(server: Server, gateway: Gateway) -> None:
    """Raise ValueError if options contradict each other, or if no volume contains the bundle."""
    kind, is_served = server.kind, gateway.host is not None
    contradictions = {
        "--grpc requires --kind deployment": server.has_grpc and kind != "deployment",
        "--incremental-upgrade requires --kind rayservice": server.has_incremental_upgrade
        and kind != "rayservice",
        "--incremental-upgrade creates its own Gateway without TLS: omit --host, and use a TLS "
        "proxy in front of the Gateway": server.has_incremental_upgrade and is_served,
        "--host does not apply to --kind kserve: KServe's own configuration determines the host "
        "name": kind == "kserve" and is_served,
        "--in-image does not apply to --kind kserve: KServe mounts the model": kind == "kserve"
        and server.is_in_image,
        "--token-file and --no-tokens contradict each other: omit one": not server.requires_tokens
        and server.token_file is not None,
    }
    for message, is_wrong in contradictions.items():
        if is_wrong:
            raise ValueError(message)
    if not server.is_in_image:
        _check_claim(server.bundle)
    _check_values(server, gateway)


def _check_claim(bundle: Path) -> None:
    parts = PurePosixPath(bundle).parts
    if parts[:1] != (_CLAIM,) or len(parts) < 2 or ".." in parts:
        raise ValueError(
            f"BUNDLE is {bundle} ({FOLDER / bundle} in the pods), but the claim {_CLAIM} is "
            f"mounted at {FOLDER / _CLAIM}: pass a relative path {_CLAIM}/NAME, or --in-image if "
            f"the image contains the bundle at {_IN_IMAGE / bundle.name}"
        )


def _check_values(server: Server, gateway: Gateway) -> None:
    try:
        quantity(server.memory_each)
    except ValueError as error:
        raise ValueError(f"--memory: {error}") from error
    if gateway.host is not None and not _HOST.fullmatch(gateway.host):
        raise ValueError(
            f"--host {gateway.host} is not a DNS name: pass a name such as kway.example.com, "
            "without https:// and without a port"
        )
    checked_name("--tls-secret", gateway.tls_secret)
    checked_name("--gateway-class", gateway.gateway_class)


def arguments(server: Server) -> list[str]:
    """Return the arguments of `kway serve` in the pod of base/serving."""
    line = [server.path, "--host", "0.0.0.0", "--port", _PORT]
    line += ["--no-ray", "--threads", str(server.cpus)]
    line += ["--token-file", TOKENS] if server.requires_tokens else ["--no-tokens"]
    line += ["--device", "cuda"] if server.device == "cuda" else []
    line += ["--grpc-port", GRPC_PORT] if server.has_grpc else []
    return [*line, *(word for name in server.allow_imports for word in ("--allow-import", name))]
