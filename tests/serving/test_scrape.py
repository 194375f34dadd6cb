"""A real server with tokens, as strangers see it, and its monitoring: Debian's Prometheus."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.prometheus import needs_prometheus, prometheus
from tests.serving.started import (
    Server,
    as_json,
    bundle,
    end,
    error_of,
    pictures,
    replicas_of,
    start,
)

__all__ = ["bundle", "pictures"]  # fixtures

TOKEN = "a-token-of-this-test-0123456789"
OUTCOMES = {"ok": 5, "unknown_class": 3, "empty_body": 2}
INPUTS = 5 * 3
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: kway
    authorization: {{credentials_file: {credentials}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one token, for the server and for Prometheus alike."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(
    bundle: Path, credentials: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("server") / "stderr"
    running = start(bundle, errors, "--token-file", credentials, "--replicas", 1)
    yield running
    end(running)


@pytest.fixture(scope="module")
def client(server: Server, pictures: list[Path]) -> Iterator[httpx.Client]:
    """Of a server that has been asked as many questions as OUTCOMES says, and some at the door."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, timeout=30, headers=headers) as opened:
        for _ in range(OUTCOMES["ok"]):
            body = as_json(pictures[:3], classes=["husky"])
            assert opened.post("/v1/query", json=body).status_code == 200
        for _ in range(OUTCOMES["unknown_class"]):
            body = as_json(pictures[:2], classes=["hsky"])
            assert error_of(opened.post("/v1/query", json=body))[1] == "unknown_class"
        for _ in range(OUTCOMES["empty_body"]):
            assert error_of(opened.post("/v1/query"))[1] == "empty_body"
        stranger = {"Authorization": "Bearer " + "w" * 30}
        assert opened.post("/v1/query", headers=stranger).status_code == 401
        assert opened.get("/health").status_code == 200
        yield opened


def config(target: str, credentials: Path) -> str:
    """Ask `target` each second."""
    return CONFIG.format(target=target, credentials=credentials)


def value(api: httpx.Client, query: str) -> dict[str, float]:
    """Each series of an instant query by its outcome."""
    series = api.get("query", params={"query": query}).json()["data"]["result"]
    return {one["metric"].get("outcome", ""): float(one["value"][1]) for one in series}


def wait_until(api: httpx.Client, query: str, wanted: dict[str, float]) -> None:
    deadline, found = time.monotonic() + 30, value(api, query)
    while found != wanted:
        assert time.monotonic() < deadline, (query, found, wanted)
        time.sleep(0.2)
        found = value(api, query)


@needs_prometheus
def test_prometheus_counts_the_requests_that_were_sent(
    client: httpx.Client, server: Server, credentials: Path, tmp_path: Path
) -> None:
    total = sum(OUTCOMES.values())
    target = server.url.removeprefix("http://")
    with prometheus(tmp_path, config(target, credentials)) as api:
        wait_until(api, "up", {"": 1})
        wait_until(api, "sum by (outcome) (kway_query_requests_total)", OUTCOMES)
        wait_until(api, "sum(kway_query_inputs_total)", {"": INPUTS})
        wait_until(api, "sum(kway_query_seconds_count)", {"": total})
        wait_until(api, 'sum(kway_query_seconds_bucket{le="+Inf"})', {"": total})
        assert 0 < value(api, "sum(kway_query_seconds_sum)")[""] < 30 * total


def page_with(name: str, client: httpx.Client) -> str:
    """The page of metrics once `name` is on it: replicas report each second."""
    page, deadline = "", time.monotonic() + 30
    while name not in page:
        assert time.monotonic() < deadline
        page = client.get("/metrics").text
        time.sleep(0.2)
    return page


def test_the_page_says_what_model_a_replica_has_and_what_it_holds(client: httpx.Client) -> None:
    page = page_with("kway_queued_inputs{", client)
    (aligned,) = (line for line in page.splitlines() if line.startswith("kway_model_aligned{"))
    assert 'loss="batch_ce"' in aligned
    assert aligned.endswith(" 1.0")
    (held,) = (line for line in page.splitlines() if line.startswith("kway_requests_in_progress{"))
    assert held.endswith(" 0.0")


def test_the_page_counts_errors_that_no_replica_answered(
    client: httpx.Client, server: Server
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = b"POST /v1/query HTTP/1.1\r\nHost: kway\r\nContent-Length: 2147483648\r\n\r\n"
            connection.sendall(head)
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    page_with('kway_http_errors_total{node="127.0.0.1",status="413"} 3.0', client)


@needs_prometheus
def test_prometheus_without_the_token_sees_that_it_is_refused(
    client: httpx.Client, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("w" * 30)
    target = server.url.removeprefix("http://")
    with prometheus(tmp_path, config(target, tmp_path / "wrong")) as api:
        wait_until(api, "up", {"": 0})
        (found,) = api.get("targets").json()["data"]["activeTargets"]
        assert "401" in found["lastError"]


@needs_prometheus
def test_the_page_of_metrics_passes_promtool(client: httpx.Client) -> None:
    page = page_with("kway_query_seconds_bucket", client)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def is_answered(server: Server) -> bool:
    """Whether a replica has had a question; for some seconds none is there."""
    try:
        return httpx.post(f"{server.url}/v1/query", timeout=20).status_code == 400
    except httpx.TransportError:
        return False


@pytest.mark.slow
@needs_prometheus
def test_what_a_lost_replica_has_counted_stays_beside_what_the_next_one_counts(
    bundle: Path, credentials: Path, tmp_path: Path
) -> None:
    running = start(bundle, tmp_path / "stderr", "--replicas", 1)
    target = running.url.removeprefix("http://")
    try:
        with prometheus(tmp_path, config(target, credentials)) as api:
            for _ in range(4):
                assert is_answered(running)
            wait_until(api, "sum(kway_query_requests_total)", {"": 4})
            (replica,) = replicas_of(running).values()
            replica.kill()
            deadline = time.monotonic() + 60
            while not is_answered(running):
                assert time.monotonic() < deadline
                time.sleep(0.2)
            wait_until(api, "sum(kway_query_requests_total)", {"": 5})
            wait_until(api, 'sum(kway_query_seconds_bucket{le="+Inf"})', {"": 5})
            wait_until(api, "count(kway_query_seconds_count)", {"": 2})
    finally:
        end(running)


# ---------------------------------------------------------------------------- strangers


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2D/routes"])
def test_rays_own_pages_are_not_there(server: Server, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert error_of(answer)[:2] == (404, "no_such_path")


@pytest.mark.parametrize(
    "trailer",
    [f"Authorization: Bearer {TOKEN}", "x-session-id: \xff", "x-request-id: \xff"],
)
def test_what_follows_a_body_is_not_read_as_a_header_of_its_request(
    server: Server, trailer: str
) -> None:
    head = b"POST /v1/query HTTP/1.1\r\nHost: kway\r\nConnection: close\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        chunks = b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        connection.sendall(head + chunks + trailer.encode("latin-1") + b"\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"no_token" in answer
