"""Runs the pods that `kway k8s render serving` renders, for a Deployment and KServe.

Slow: each pod starts Ray and loads a model. Not emulated: the gateway, the autoscaler, and preStop.
"""

import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.kubernetes.objects import load_all
from launch.kubernetes.objects import pods as pods_of
from launch.kubernetes.server import Server
from launch.kubernetes.serving import render_server
from tests.k8s.built import needs_kustomize
from tests.k8s.cluster import Cluster, cluster
from tests.k8s.pods import Pod
from tests.serving.started import ask
from tests.system.processes import KWAY
from tests.tiny_bundle import write

pytestmark = [needs_kustomize, pytest.mark.slow]
BUNDLE = Path("bundles/glyphs")
TOKEN = secrets.token_hex(32)


@contextmanager
def made(folder: Path, *, addresses: int, **options: Any) -> Iterator[tuple[Cluster, Any]]:
    """Yield a cluster with a rendered server and its Secret, and the template of its pod."""
    write(folder / "claims" / BUNDLE)
    tokens = folder / "tokens"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    server = Server(BUNDLE, cpus=1, token_file=tokens, **options)
    manifests = load_all(render_server(server))
    (pod,) = pods_of(manifests)
    with cluster(folder, manifests, addresses=addresses) as running:
        yield running, pod.template


def started(running: Cluster, name: str, template: Mapping[str, Any]) -> Pod:
    pod = running.start(name, template)
    probe = pod.container["startupProbe"]
    attempts = probe["failureThreshold"] * probe["periodSeconds"]
    for _ in range(attempts):
        assert pod.look() is None, running.logs
        if pod.first_process() and probed(pod, "startupProbe"):
            return pod
        time.sleep(1)
    raise AssertionError(f"{name} is not ready\n{running.logs}")


def probed(pod: Pod, probe: str) -> bool:
    """Return whether a probe succeeds, as the kubelet decides it."""
    get = pod.container[probe]["httpGet"]
    ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
    url = f"http://{pod.host.address}:{ports[get['port']]}{get['path']}"
    code = curl(pod, url, "--output", "/dev/null", "--write-out", "%{http_code}", check=False)
    return 200 <= int(code) < 400


def curl(pod: Pod, url: str, *options: str, check: bool = True) -> str:
    """Return the output of curl on the pod's host, outside the pod."""
    words = ["ip", "netns", "exec", pod.host.name, "curl", "--silent", *options, url]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or not check, f"{done}\n{pod.log}"
    return done.stdout


def api(pod: Pod, path: str) -> tuple[int, Any]:
    """Return the status and the JSON of a response to a request with the token."""
    options = ["--header", f"Authorization: Bearer {TOKEN}", "--write-out", "\n%{http_code}"]
    text, _, code = curl(pod, f"http://{pod.host.address}:8000{path}", *options).rpartition("\n")
    return int(code), json.loads(text)


def query(pod: Pod, folder: Path, image: Path) -> Any:
    """Return the answer of `kway query` through the pod's address."""
    url = f"http://{pod.host.address}:8000"
    words = [*KWAY, "query", url, "--token-file", str(folder / "tokens"), *about(image)]
    inside = ["ip", "netns", "exec", pod.host.name, *words]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stderr}\n{pod.log}"
    return json.loads(done.stdout)


def about(image: Path) -> list[str]:
    return ["--class", "husky", str(image), "--recall", "0.9", "--json"]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    import cv2
    import numpy as np

    path = tmp_path / "image.png"
    cv2.imwrite(str(path), np.arange(256, dtype=np.uint8).reshape(16, 16))
    return path


def test_the_pods_of_a_deployment_answer_alike_and_stop_within_their_grace_period(tmp_path, image):
    with made(tmp_path, addresses=2, replicas=(2, 2), has_grpc=True) as (running, template):
        pods = [started(running, f"kway-serve-{number}", template) for number in range(2)]
        alone = json.loads(ask(tmp_path / "claims" / BUNDLE, *about(image)))
        for pod in pods:
            assert probed(pod, "readinessProbe")
            assert probed(pod, "livenessProbe")
            assert query(pod, tmp_path, image) == alone
            assert curl(pod, f"http://{pod.host.address}:8000/v1/model").count("no_token") == 1
            listening = pod.execute("sh", "-c", "cat /proc/net/tcp").stdout
            # Only the ports that the manifest declares listen on an address other than loopback.
            assert open_ports(listening) == {8000, 9000}
        first, second = pods
        first.delete()
        while first.look() is None:
            time.sleep(0.2)
        assert first.exit_code == 0, running.logs
        assert query(second, tmp_path, image) == alone
        assert TOKEN not in running.logs


def open_ports(table: str) -> set[int]:
    """Return the TCP ports in /proc/net/tcp that listen on an address other than loopback."""
    rows = [line.split() for line in table.splitlines()[1:]]
    listening = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {int(port, 16) for address, port in listening if address != "0100007F"}


def test_the_pod_of_kserve_answers_the_open_inference_protocol(tmp_path):
    with made(tmp_path, addresses=1, kind="kserve", replicas=(1, 1)) as (running, template):
        # KServe mounts the folder of the bundle, not the claim's root.
        claim = tmp_path / "claims/bundles"
        for path in (claim / "glyphs").iterdir():
            path.rename(claim / path.name)
        pod = started(running, "kway-predictor", template)
        code, metadata = api(pod, "/v2/models/models")
        assert (code, metadata["name"]) == (200, "models")
        assert probed(pod, "readinessProbe")
