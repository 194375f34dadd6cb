"""Emulates KubeRay: starts the pods of a RayService and sends its Serve configuration to the head.

Adds the same fields to pods as KubeRay's pod.go does. Not emulated: Redis, the autoscaler, pod
restarts, and a new cluster that replaces the old one.
"""

import copy
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from launch.kubernetes.objects import quantity
from tests.k8s.cluster import Cluster
from tests.k8s.pods import NAMESPACE, Pod

_PORT = 6379
_BASH = ("/bin/bash", "-c", "--")
_PUT = """
import os, sys, urllib.request
request = urllib.request.Request(
    "http://127.0.0.1:8265/api/serve/applications/",
    data=sys.stdin.buffer.read(),
    headers={
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ["RAY_AUTH_TOKEN"],
    },
    method="PUT",
)
print(urllib.request.urlopen(request, timeout=60).status)
"""


@dataclass(frozen=True)
class RayService:
    """The pods of a RayService. `token` authenticates Ray's processes to each other."""

    cluster: Cluster
    manifest: Mapping[str, Any]
    token: str
    head: Pod
    workers: tuple[Pod, ...]

    def wait_until_ready(self, pod: Pod, *, seconds: float = 300) -> None:
        """Wait until the readinessProbe succeeds. Raises AssertionError with all logs if it does
        not."""
        command = pod.container["readinessProbe"]["exec"]["command"]
        deadline = time.monotonic() + seconds
        while not pod.first_process() or (tried := pod.execute(*command)).returncode:
            assert pod.look() is None, f"{pod.name} exited: {self.cluster.logs}"
            late = time.monotonic() > deadline
            assert not late, f"{pod.name} is not ready: {tried.stderr}\n{self.cluster.logs}"
            time.sleep(1)

    def deploy(self) -> None:
        """Send the Serve configuration to the head as soon as it is ready."""
        self.wait_until_ready(self.head)
        config = json.dumps(yaml.safe_load(self.manifest["spec"]["serveConfigV2"]))
        done = self.head.execute("python", "-c", _PUT, given=config)
        assert done.returncode == 0, f"{done.stderr}\n{self.cluster.logs}"


def start(cluster: Cluster, manifest: Mapping[str, Any]) -> RayService:
    """Start the head and the workers of all groups. They run until the cluster ends."""
    spec, name = manifest["spec"]["rayClusterConfig"], manifest["metadata"]["name"]
    service = f"{name}-head-svc.{NAMESPACE}.svc.cluster.local"
    token = secrets.token_hex(16)
    own = {
        "RAY_AUTH_TOKEN": token,
        "RAY_AUTH_MODE": spec["authOptions"]["mode"],
        "RAY_CLUSTER_NAME": name,
        "RAY_PORT": str(_PORT),
        "RAY_TIMEOUT_MS_TASK_WAIT_FOR_DEATH_INFO": "0",
        "RAY_GCS_SERVER_REQUEST_TIMEOUT_SECONDS": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
    }
    group = spec["headGroupSpec"]
    head = cluster.start(f"{name}-head", _head(group), variables=_head_variables(own, name))
    cluster.names |= {service: head.host.address}
    workers = []
    for group in spec["workerGroupSpecs"]:
        for number in range(group["replicas"]):
            pod = f"{name}-{group['groupName']}-worker-{number}"
            variables = _worker_variables(own, pod, group, service)
            workers.append(cluster.start(pod, _worker(group, service), variables=variables))
    return RayService(cluster, manifest, token, head, tuple(workers))


def _head(group: Mapping[str, Any]) -> dict[str, Any]:
    template = _with_command(group, "ray start --head", {"no-monitor": "true"})
    # The autoscaler container writes its logs to this volume.
    template["spec"]["volumes"].append({"name": "ray-logs", "emptyDir": {}})
    (container,) = template["spec"]["containers"]
    container["volumeMounts"].append({"name": "ray-logs", "mountPath": "/tmp/ray"})
    return template


def _worker(group: Mapping[str, Any], service: str) -> dict[str, Any]:
    template = _with_command(group, "ray start", {"address": f"{service}:{_PORT}"})
    (container,) = template["spec"]["containers"]
    check = f"ray health-check --address {service}:{_PORT} > /dev/null 2>&1"
    copied = ("env", "image", "securityContext", "volumeMounts")
    first = {key: container[key] for key in copied if key in container}
    first |= {
        "name": "wait-gcs-ready",
        "command": list(_BASH),
        "args": [f"until {check}; do sleep 5; done"],
    }
    template["spec"]["initContainers"] = [first]
    return template


def _with_command(
    group: Mapping[str, Any], command: str, more: Mapping[str, str]
) -> dict[str, Any]:
    template = copy.deepcopy(dict(group["template"]))
    (container,) = template["spec"]["containers"]
    given = {
        "dashboard-agent-listen-port": "52365",
        "metrics-export-port": "8080",
        "memory": str(int(quantity(container["resources"]["limits"]["memory"]))),
        "block": "true",
    }
    options = given | dict(group["rayStartParams"]) | dict(more)
    words = [f"--{k}" if v == "true" else f"--{k}={v}" for k, v in sorted(options.items())]
    container["command"] = list(_BASH)
    container["args"] = [f"ulimit -n 65536; {command} {' '.join(words)}"]
    return template


def _head_variables(own: Mapping[str, str], name: str) -> dict[str, str]:
    address = f"127.0.0.1:{_PORT}"
    named = {"RAY_CLOUD_INSTANCE_ID": f"{name}-head", "RAY_NODE_TYPE_NAME": "headgroup"}
    return {**own, **named, "RAY_ADDRESS": address, "RAY_enable_autoscaler_v2": "true"}


def _worker_variables(
    own: Mapping[str, str], name: str, group: Mapping[str, Any], service: str
) -> dict[str, str]:
    named = {"RAY_CLOUD_INSTANCE_ID": name, "RAY_NODE_TYPE_NAME": group["groupName"]}
    addresses = {"FQ_RAY_IP": service, "RAY_ADDRESS": f"{service}:{_PORT}"}
    # With GCS fault tolerance, workers wait for a restarted head.
    return {**own, **named, **addresses, "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
