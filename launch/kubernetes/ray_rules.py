"""Rules for a RayService: authentication, order of timeouts, and the files and ports of its pods.

Each rule yields one line per problem, including the name of the object.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from launch.kubernetes.objects import (
    Manifest,
    Pod,
    at,
    by_name,
    is_below,
    load,
    name_of,
    of_kind,
    pods_of_ray,
)
from launch.kubernetes.pod_rules import ALWAYS_PRESENT

_GRACE_SECONDS = 30
_FILES = ("bundle", "token_file")


def ray_requires_a_token(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that Ray requires a token. Otherwise anyone who reaches its ports can run any code."""
    for service in of_kind(manifests, "RayService"):
        mode = at(service, "spec", "rayClusterConfig", "authOptions").get("mode")
        if mode != "token":
            yield f"{name_of(service)}: authOptions.mode is {mode}: set it to token"


def head_runs_no_replicas(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that the head node runs no replicas, because they would be lost with it."""
    for service in of_kind(manifests, "RayService"):
        group = at(service, "spec", "rayClusterConfig", "headGroupSpec")
        cpus = at(group, "rayStartParams").get("num-cpus")
        if cpus != "0":
            yield f'{name_of(service)}: num-cpus of the head node is {cpus}: set it to "0"'


def redis_exists(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that redisAddress names a Service in the manifests and one of its ports."""
    services = {
        name: [port.get("port") for port in at(manifest, "spec").get("ports", ())]
        for name, manifest in by_name(manifests, "Service").items()
    }
    for service in of_kind(manifests, "RayService"):
        options = at(service, "spec", "rayClusterConfig", "gcsFaultToleranceOptions")
        host, _, port = str(options.get("redisAddress", "")).partition(":")
        if host and port not in map(str, services.get(host, ())):
            yield f"{name_of(service)}: redisAddress {host}:{port} does not match any Service"


def files_are_in_every_pod(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that every pod mounts the bundle, tokens and galleries of serveConfigV2.

    Every pod needs them, because a replica may start in any pod.
    """
    for service in of_kind(manifests, "RayService"):
        paths = [path for arguments in _arguments(service) for path in _paths(arguments)]
        for pod in _pods(service):
            mounts = [m for each in pod.containers for m in each.get("volumeMounts", ())]
            folders = [mount.get("mountPath", "") for mount in mounts]
            for path in paths:
                if not is_below(path, (*ALWAYS_PRESENT, *folders)):
                    yield f"{pod.where}: serveConfigV2 uses {path}, but no volume is mounted there"


def api_is_at_its_port(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that the API listens on all addresses, on the port that pods declare as `serve`."""
    for service in of_kind(manifests, "RayService"):
        http = at(_config(service), "http_options")
        if http.get("host") != "0.0.0.0":
            yield f"{name_of(service)}: http_options.host is {http.get('host')}: set it to 0.0.0.0"
        for pod in _pods(service):
            ports = [p for c in pod.containers for p in c.get("ports", ())]
            declared = [p.get("containerPort") for p in ports if p.get("name") == "serve"]
            if declared != [http.get("port")]:
                yield f"{pod.where}: port serve is {declared}, but the API is on {http.get('port')}"


def requests_end_before_their_pod(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Check that preStop waits for in-flight requests, because Ray exits at once on SIGTERM."""
    for service in of_kind(manifests, "RayService"):
        request = max((_request_seconds(each) for each in _arguments(service)), default=0.0)
        for pod in _pods(service):
            grace = pod.spec.get("terminationGracePeriodSeconds", _GRACE_SECONDS)
            for container in pod.containers:
                wait = at(container, "lifecycle", "preStop", "sleep").get("seconds", 0)
                if not request < wait < grace:
                    yield (
                        f"{pod.where}: request_timeout_seconds {request:g}, preStop sleep {wait} "
                        f"and terminationGracePeriodSeconds {grace} must increase in this order: "
                        "raise the later ones"
                    )


def _pods(service: Manifest) -> Iterator[Pod]:
    return pods_of_ray(name_of(service), at(service, "spec", "rayClusterConfig"))


def _config(service: Manifest) -> Any:
    return load(at(service, "spec").get("serveConfigV2", ""))


def _arguments(service: Manifest) -> Iterator[Manifest]:
    for application in at(_config(service)).get("applications", ()):
        yield at(application, "args")


def _paths(arguments: Manifest) -> Iterator[str]:
    config = at(arguments, "config")
    stated = {**arguments, **config}
    yield from (str(stated[name]) for name in _FILES if stated.get(name))
    yield from map(str, at(config, "galleries").values())


def _request_seconds(arguments: Manifest) -> float:
    return float(at(arguments, "config").get("request_timeout_seconds", 0))


RAY_RULES = (
    ray_requires_a_token,
    head_runs_no_replicas,
    redis_exists,
    files_are_in_every_pod,
    api_is_at_its_port,
    requests_end_before_their_pod,
)
