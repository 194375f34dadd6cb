"""Debian's Prometheus, run on loopback for a test."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from serving.addresses import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="requires prometheus: apt-get install prometheus",
)


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[httpx.Client]:
    """Run Prometheus with this YAML configuration and its data in `folder`; yield an API client."""
    (folder / "prometheus.yml").write_text(config)
    port = free_port("127.0.0.1", 0)
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["prometheus", *arguments], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as api:
            _wait_until_ready(api)
            yield api
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(api: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if api.get("query", params={"query": "1"}).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
