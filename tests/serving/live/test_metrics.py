"""The metrics page of a real server, scraped by Debian's Prometheus, and how unauthorized requests
are rejected.
"""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.prometheus import needs_prometheus, prometheus
from tests.serving.live.servers import REPLICAS, TOKEN
from tests.serving.started import (
    Server,
    SharedServer,
    as_json,
    counts,
    end,
    error_of,
    replicas_of,
    start,
    wait_for_counts,
)

OUTCOMES = {"ok": 5, "unknown_class": 3, "empty_body": 2}
EXPECTED = {
    **{f"kway_query_requests_total:{outcome}": count for outcome, count in OUTCOMES.items()},
    "kway_query_inputs_total": 5 * 3,
    "kway_query_seconds_count": sum(OUTCOMES.values()),
}
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: kway
    authorization: {{credentials_file: {credentials}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture(scope="module")
def before(guarded_server: SharedServer, images: list[Path]) -> dict[str, float]:
    """The counts before this fixture sends the requests in OUTCOMES and some requests that are not
    counted.
    """
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=guarded_server.get().url, timeout=30, headers=headers) as client:
        time.sleep(3)  # until the last requests of other tests have been reported
        found = counts(client)
        for _ in range(OUTCOMES["ok"]):
            body = as_json(images[:3], classes=["husky"])
            assert client.post("/v1/query", json=body).status_code == 200
        for _ in range(OUTCOMES["unknown_class"]):
            body = as_json(images[:2], classes=["hsky"])
            assert error_of(client.post("/v1/query", json=body))[1] == "unknown_class"
        for _ in range(OUTCOMES["empty_body"]):
            assert error_of(client.post("/v1/query"))[1] == "empty_body"
        wrong_token = {"Authorization": "Bearer " + "w" * 30}
        assert client.post("/v1/query", headers=wrong_token).status_code == 401
        assert client.get("/health").status_code == 200
    return found


@pytest.fixture
def increases(client: httpx.Client, before: dict[str, float]) -> dict[str, float]:
    """The increase of each count since `before`."""
    return wait_for_counts(client, before, EXPECTED)


def test_the_counts_match_the_requests_sent(increases: dict[str, float]) -> None:
    assert {key: increases[key] for key in EXPECTED} == EXPECTED
    assert 0 < increases["kway_query_seconds_sum"] < 30 * sum(OUTCOMES.values())


def config(target: str, credentials: Path) -> str:
    """Return a configuration that scrapes `target` every second."""
    return CONFIG.format(target=target, credentials=credentials)


def value(api: httpx.Client, query: str) -> dict[str, float]:
    """Return the values of an instant query, keyed by outcome."""
    series = api.get("query", params={"query": query}).json()["data"]["result"]
    return {one["metric"].get("outcome", ""): float(one["value"][1]) for one in series}


def wait_until(api: httpx.Client, query: str, wanted: dict[str, float]) -> None:
    deadline, found = time.monotonic() + 30, value(api, query)
    while found != wanted:
        assert time.monotonic() < deadline, (query, found, wanted)
        time.sleep(0.2)
        found = value(api, query)


@needs_prometheus
def test_prometheus_scrapes_the_counts_shown_on_the_page(
    increases: dict[str, float], client: httpx.Client, server: Server, tokens: Path, tmp_path: Path
) -> None:
    name = "kway_query_requests_total"
    page = counts(client)
    outcomes = {key.split(":")[1]: page[key] for key in page if key.startswith(f"{name}:")}
    total = page["kway_query_seconds_count"]
    with prometheus(tmp_path, config(server.url.removeprefix("http://"), tokens)) as api:
        wait_until(api, "up", {"": 1})
        wait_until(api, f"sum by (outcome) ({name})", outcomes)
        wait_until(api, "sum(kway_query_inputs_total)", {"": page["kway_query_inputs_total"]})
        wait_until(api, "sum(kway_query_seconds_count)", {"": total})
        wait_until(api, 'sum(kway_query_seconds_bucket{le="+Inf"})', {"": total})


def wait_for_page(client: httpx.Client, condition: Callable[[list[str]], bool]) -> list[str]:
    """Return the lines of the page once they satisfy `condition`. Replicas report every second."""
    deadline = time.monotonic() + 30
    while True:
        lines = client.get("/metrics").text.splitlines()
        if condition(lines):
            return lines
        assert time.monotonic() < deadline, lines
        time.sleep(0.2)


def test_the_page_shows_the_model_and_load_of_each_replica(client: httpx.Client) -> None:
    def all_are_idle(lines: list[str]) -> bool:
        # The page still shows the last values of killed replicas.
        in_progress = [line for line in lines if line.startswith("kway_requests_in_progress{")]
        return sum(line.endswith(" 0.0") for line in in_progress) >= REPLICAS

    lines = wait_for_page(client, all_are_idle)
    aligned = [line for line in lines if line.startswith("kway_model_aligned{")]
    assert aligned
    assert all('loss="batch_ce"' in line and line.endswith(" 1.0") for line in aligned)


@pytest.mark.usefixtures("before")  # by then, the page shows earlier errors
def test_the_page_counts_errors_for_requests_that_did_not_reach_a_replica(
    client: httpx.Client, server: Server
) -> None:
    labels = 'node="127.0.0.1",protocol="http",source="proxy",status="413"'
    series, before = f"kway_http_errors_total{{{labels}}} ", 0.0
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(series):
            before = float(line.removeprefix(series))
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = b"POST /v1/query HTTP/1.1\r\nHost: kway\r\nContent-Length: 2147483648\r\n\r\n"
            connection.sendall(head)
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    wait_for_page(client, lambda lines: f"{series}{before + 3}" in lines)


@needs_prometheus
def test_prometheus_without_the_token_gets_401(
    client: httpx.Client, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("w" * 30)
    target = server.url.removeprefix("http://")
    with prometheus(tmp_path, config(target, tmp_path / "wrong")) as api:
        wait_until(api, "up", {"": 0})
        (found,) = api.get("targets").json()["data"]["activeTargets"]
        assert "401" in found["lastError"]


@needs_prometheus
def test_the_metrics_page_passes_promtool(client: httpx.Client) -> None:
    lines = wait_for_page(client, lambda lines: "kway_query_seconds_bucket" in "".join(lines))
    page = "\n".join([*lines, ""])
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=600
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def is_answered(server: Server) -> bool:
    """Return whether a replica processes a request. For a few seconds after a kill, there is no
    replica.
    """
    try:
        return httpx.post(f"{server.url}/v1/query", timeout=60).status_code == 400
    except httpx.TransportError:
        return False


@pytest.mark.slow
@needs_prometheus
def test_the_counts_of_a_lost_replica_and_its_successor_are_added(
    bundle: Path, tokens: Path, tmp_path: Path
) -> None:
    running = start(bundle, tmp_path / "stderr", "--replicas", 1)
    target = running.url.removeprefix("http://")
    try:
        with prometheus(tmp_path, config(target, tokens)) as api:
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


# ---------------------------------------------------------------------------- unauthorized requests


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2D/routes"])
def test_ray_pages_return_404(server: Server, path: str) -> None:
    answer = httpx.get(f"{server.url}{path}")
    assert error_of(answer)[:2] == (404, "no_such_path")


@pytest.mark.parametrize(
    "trailer",
    [f"Authorization: Bearer {TOKEN}", "x-session-id: \xff", "x-request-id: \xff"],
)
def test_trailers_are_not_read_as_headers(server: Server, trailer: str) -> None:
    head = b"POST /v1/query HTTP/1.1\r\nHost: kway\r\nConnection: close\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        chunks = b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
        connection.sendall(head + chunks + trailer.encode("latin-1") + b"\r\n\r\n")
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"no_token" in answer
