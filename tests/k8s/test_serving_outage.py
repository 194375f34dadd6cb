"""Runs the serving overlay while the head of its Ray cluster is down.

Slow: it takes over 20 s to start Ray in two pods and deploy the application, and the outage lasts
30 s.
"""

import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s import ray_service
from tests.k8s.built import built, needs_kustomize, one
from tests.k8s.cluster import cluster
from tests.k8s.ray_service import RayService
from tests.tiny_bundle import write

pytestmark = [needs_kustomize, pytest.mark.slow]
# Ray's agents drop gauges that have not been set for twice the report interval of 10 s.
OUTAGE_SECONDS = 30
METRICS_SECONDS = 60


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RayService]:
    """A head and a worker that serve a small bundle."""
    write(tmp_path / "claims/bundles/glyphs")
    secret = {"kind": "Secret", "metadata": {"name": "kway-tokens"}}
    manifests = built("overlays/serving/rayservice")
    manifests.append(secret | {"stringData": {"tokens": f"{secrets.token_hex(32)}\n"}})
    with cluster(tmp_path, manifests, addresses=2) as made:
        found = ray_service.start(made, one(manifests, "RayService"))
        found.deploy()
        found.wait_until_ready(found.workers[0])
        yield found


def curl(service: RayService, url: str, *options: str) -> str:
    """Return the output of curl in the worker."""
    done = service.workers[0].execute("curl", "--silent", *options, url)
    assert done.returncode == 0, f"{done.stderr}\n{service.cluster.logs}"
    return done.stdout


def metrics(service: RayService) -> dict[str, float]:
    """Return the sum of the worker agent's series for each name and status."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(
        r"^ray_(\w+)\{(.*)\} (\S+)$", curl(service, "http://localhost:8080/metrics"), re.MULTILINE
    ):
        status = re.search(r'error_code="(\d+)"', labels)
        key = f"{name}:{status[1]}" if status else name
        found[key] = found.get(key, 0) + float(value)
    return found


def status(service: RayService) -> str:
    options = ("--output", "/dev/null", "--write-out", "%{http_code}")
    return curl(service, "http://localhost:8000/v1/model", *options)


def test_a_worker_serves_and_reports_metrics_without_the_head(service: RayService) -> None:
    assert status(service) == "401"
    service.head.kill()
    num_requests, until = 1, time.monotonic() + OUTAGE_SECONDS
    while time.monotonic() < until:
        assert status(service) == "401", service.cluster.logs
        num_requests += 1
        time.sleep(1)
    until = time.monotonic() + METRICS_SECONDS
    while metrics(service).get("serve_num_http_error_requests_total:401", 0) < num_requests:
        assert time.monotonic() < until, (num_requests, metrics(service))
        time.sleep(1)
    assert metrics(service).get("kway_model_aligned") == 1
