"""Rules for pods that run `kway serve`, and for the objects around them.

Each rule yields one line per problem, including the name of the object.
"""

from collections.abc import Iterator, Sequence

from launch.kubernetes.objects import (
    Manifest,
    Pod,
    at,
    name_of,
    of_kind,
    option,
    pods,
    serves,
    words,
)
from serving.config import ServingConfig

# After SIGTERM, a server has 10 s for requests in progress and, with Ray, 30 s to stop it.
_STOP_SECONDS, _STOP_RAY_SECONDS = 10, 30
_GRACE_SECONDS = 30
_HEALTH = ("/health", "/v2/health/live", "/v2/health/ready")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_GATEWAY_API = "gateway.networking.k8s.io"


def servers_finish_their_requests(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that preStop lets requests finish, and that the grace period allows for the rest."""
    for pod, container in _servers(manifests):
        timeout = option(words(container), "--timeout")
        request = float(timeout or ServingConfig().request_timeout_seconds)
        wait = at(container, "lifecycle", "preStop", "sleep").get("seconds", 0)
        grace = pod.spec.get("terminationGracePeriodSeconds", _GRACE_SECONDS)
        stop = _STOP_SECONDS + (0 if "--no-ray" in words(container) else _STOP_RAY_SECONDS)
        if not request < wait <= grace - stop:
            yield (
                f"{pod.where}: --timeout {request:g}, preStop sleep {wait} and "
                f"terminationGracePeriodSeconds {grace} must increase in this order, the last one "
                f"by at least {stop}: raise the later ones"
            )


def probes_ask_the_server(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that all three probes request the state of the server, at the port of its API."""
    for pod, container in _servers(manifests):
        ports = {port.get("name"): port.get("containerPort") for port in container.get("ports", ())}
        for name, number in (("serve", "--port"), ("grpc", "--grpc-port")):
            listens = option(words(container), number)
            if str(ports.get(name, "")) != (listens or ""):
                yield f"{pod.where}: port {name} is {ports.get(name)}, but {number} is {listens}"
        for probe in _PROBES:
            get = at(container, probe, "httpGet")
            if get.get("path") not in _HEALTH or get.get("port") != "serve":
                yield (
                    f"{pod.where}: {probe} does not request one of {', '.join(_HEALTH)} at port "
                    "serve: set httpGet"
                )


def scale_targets_exist(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that an autoscaler's target is in the manifests and does not set a number of pods,
    which each `kubectl apply` would restore."""
    known = {name_of(each): each for each in manifests}
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler"):
        spec = at(scaler, "spec")
        target = at(spec, "scaleTargetRef")
        name = f"{target.get('kind')}/{target.get('name')}"
        if name not in known:
            yield f"{name_of(scaler)} scales {name}, which does not exist"
        elif "replicas" in at(known[name], "spec"):
            yield f"{name_of(scaler)} scales {name}, which sets replicas: remove it"
        if spec.get("minReplicas", 1) > spec.get("maxReplicas", 0):
            yield f"{name_of(scaler)}: minReplicas is above maxReplicas: raise maxReplicas"


def routes_reach_servers(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that routes name a listener of a Gateway and a port of a Service, and that policies
    name a Gateway or a rule of a route."""
    sections, ports = _sections(manifests), _service_ports(manifests)
    for manifest in manifests:
        spec = at(manifest, "spec")
        for parent in spec.get("parentRefs", ()):
            if ("Gateway", parent.get("name"), parent.get("sectionName")) not in sections:
                yield f"{name_of(manifest)}: its parent {dict(parent)} does not exist"
        if manifest.get("kind") in ("HTTPRoute", "GRPCRoute"):
            for backend in (b for rule in spec.get("rules", ()) for b in rule["backendRefs"]):
                if (backend.get("name"), backend.get("port")) not in ports:
                    yield f"{name_of(manifest)}: no Service has the port {dict(backend)}"
        for target in spec.get("targetRefs", ()):
            about = (target.get("kind"), target.get("name"), target.get("sectionName"))
            if target.get("group") != _GATEWAY_API or about not in sections:
                yield f"{name_of(manifest)}: its target {dict(target)} does not exist"


def _servers(manifests: Sequence[Manifest]) -> Iterator[tuple[Pod, Manifest]]:
    for pod in pods(manifests):
        yield from ((pod, each) for each in pod.containers if serves(each))


def _sections(manifests: Sequence[Manifest]) -> set[tuple[object, object, object]]:
    """Return kind, name and section (or None for the whole object) of Gateways and routes."""
    found: set[tuple[object, object, object]] = set()
    for manifest in manifests:
        kind, name = manifest.get("kind"), at(manifest, "metadata").get("name")
        spec = at(manifest, "spec")
        for section in (*spec.get("listeners", ()), *spec.get("rules", ()), {}):
            found.add((kind, name, section.get("name")))
    return found


def _service_ports(manifests: Sequence[Manifest]) -> set[tuple[object, object]]:
    """Return name and port of all Services, including the one that KubeRay creates for the API."""
    found: set[tuple[object, object]] = set()
    for service in of_kind(manifests, "Service"):
        name = at(service, "metadata").get("name")
        found |= {(name, port.get("port")) for port in at(service, "spec").get("ports", ())}
    for service in of_kind(manifests, "RayService"):
        found.add((f"{at(service, 'metadata').get('name')}-serve-svc", 8000))
    return found


SERVER_RULES = (
    servers_finish_their_requests,
    probes_ask_the_server,
    scale_targets_exist,
    routes_reach_servers,
)
