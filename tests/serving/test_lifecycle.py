"""Slow requests and slow servers, shutdown, and recovery from lost processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.dispositions import ignored, is_ignored
from tests.quiet_server import QuietServer
from tests.serving.in_process import application, listening, occupied
from tests.serving.started import Server, bundle, end, start
from tests.system.processes import ROOT
from tests.waiting import wait_until

__all__ = ["bundle"]  # a fixture
ALICE, BOB = "alice-" + "a" * 30, "bob-" + "b" * 30
JSON = "application/json"


# -- slots of a replica ------------------------------------------------------------------------


@contextmanager
def begun(
    url: str, method: str, path: str, kind: str, token: str = ALICE, length: int = 100
) -> Iterator[socket.socket]:
    """Start a request whose body has `length` bytes, and send only the first byte."""
    parts = urlsplit(url)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: {kind}\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n-"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(head.encode())
        yield connection


def answer_of(connection: socket.socket) -> tuple[int, str]:
    """Receive a response and return its status and error code."""
    head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    while status >= 400 and not body.endswith(b"}}"):
        body += connection.recv(65536)
    return status, json.loads(body)["error"]["code"] if status >= 400 else ""


@pytest.fixture(scope="module")
def url(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{ALICE}\n{BOB}\n")
    limits = {
        "max_requests": 2,
        "request_timeout_seconds": 10,
        "max_uploads": 6,
        "max_uploads_per_client": 5,
        "max_body_bytes": 100_000,
        "max_upload_bytes": 250_000,
        "max_upload_bytes_per_client": 150_000,
        "upload_grace_seconds": 2,
        "min_upload_bytes_per_second": 50_000,
    }
    with listening(application(bundle, token_file=tokens, **limits)) as found:
        yield found


BODIES = [
    ("POST", "/v1/query", JSON),
    ("POST", "/v1/query", "multipart/form-data; boundary=x"),
    ("POST", "/v1/query?classes=husky", "image/png"),
    ("POST", "/v1/classify", JSON),
    ("POST", "/v1/classify?top=2", "image/png"),
]


def status_of(url: str, token: str, size: int = 0) -> tuple[int, str]:
    """Send a complete body of `size` bytes and return the status and error code. The status is 400
    if the server has read the body.
    """
    headers = {"authorization": f"Bearer {token}", "content-type": JSON}
    answer = httpx.post(f"{url}/v1/query", headers=headers, content=b"x" * size)
    return answer.status_code, answer.json()["error"]["code"]


def test_slow_bodies_occupy_no_slot_and_end_with_408(url: str) -> None:
    """There are more slow bodies than `max_requests` allows."""
    with ExitStack() as opened:
        slow = [opened.enter_context(begun(url, *body)) for body in BODIES]
        assert status_of(url, BOB) == (400, "empty_body")
        assert {answer_of(one) for one in slow} == {(408, "slow_body")}


def test_a_client_at_its_upload_limit_leaves_uploads_for_others(url: str) -> None:
    with ExitStack() as opened:
        for body in BODIES:
            opened.enter_context(begun(url, *body))
        wait_until(lambda: status_of(url, ALICE) == (429, "too_many_uploads"))
        with begun(url, *BODIES[0], token=BOB):
            wait_until(lambda: status_of(url, BOB) == (429, "too_many_uploads"))
    wait_until(lambda: status_of(url, BOB) == (400, "empty_body"))


def test_a_client_at_its_upload_byte_limit_leaves_bytes_for_others(url: str) -> None:
    size = 80_000
    with begun(url, *BODIES[0], length=size + 2) as slow:
        slow.sendall(b"x" * size)
        wait_until(lambda: status_of(url, ALICE, size) == (429, "too_many_upload_bytes"))
        assert status_of(url, BOB, size) == (400, "invalid_json")
        assert status_of(url, ALICE, 10) == (400, "invalid_json")
    wait_until(lambda: status_of(url, ALICE, size) == (400, "invalid_json"))


def test_an_upload_at_the_minimum_rate_may_take_longer_than_the_grace_period(url: str) -> None:
    with begun(url, *BODIES[0], length=100_000) as slow:
        for _ in range(3):
            slow.sendall(b"x" * 25_000)
            time.sleep(0.8)
        slow.sendall(b"x" * 24_999)
        assert answer_of(slow) == (400, "invalid_json")


def test_a_full_replica_rejects_a_request_before_its_body_arrives(bundle: Path) -> None:
    with listening(application(bundle, max_requests=1, batch_wait_seconds=60)) as url:
        with occupied(url):
            wait_until(lambda: status_of(url, BOB) == (429, "too_busy"))
            with begun(url, *BODIES[0]) as other:
                assert answer_of(other) == (429, "too_busy")
            assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: status_of(url, BOB) == (400, "empty_body"))


# -- slow and lost servers ---------------------------------------------------------------------

WAIT = """
import sys
from serving.deploy import stop_signal
stop_signal._POLL_SECONDS = 0.05
stop = stop_signal.StopSignal()
try:
    stop.wait(sys.argv[1], stop_signal.HealthTimeouts(response=0.3, slow=0.5, lost=1.0))
except OSError as error:
    sys.exit(f"error: {error}")
"""


class Slow(QuietServer):
    """Responds to /health while `answers` is set. Otherwise, requests wait."""

    def __init__(self) -> None:
        self.answers, self.num_answered = Event(), 0
        super().__init__(("127.0.0.1", 0), _Health)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Health(BaseHTTPRequestHandler):
    server: Slow

    def do_GET(self) -> None:
        self.server.answers.wait(20)
        with suppress(ConnectionError):
            self.send_response(200)
            self.end_headers()
            self.server.num_answered += 1

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def slow_server() -> Iterator[Slow]:
    server = Slow()
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.answers.set()
        server.shutdown()
        thread.join(60)
        server.server_close()


@contextmanager
def waiting_process(url: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that waits for a signal while the server at `url` is healthy."""
    command = [sys.executable, "-c", WAIT, url]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_answers(server: Slow) -> None:
    """Wait until the process has received a response. The server also responds to requests that
    have already timed out. There are fewer than 20 of these, so wait for more responses than that.
    """
    before = server.num_answered
    wait_until(lambda: server.num_answered > before + 20)


def test_a_slow_server_is_reported_once_until_it_responds_and_is_not_stopped() -> None:
    with slow_server() as server, waiting_process(server.url) as process:
        assert process.stderr is not None
        for _ in range(2):
            line = process.stderr.readline()
            assert line.startswith(f"warning: {server.url}/health"), line
            time.sleep(2)  # longer than the timeout for a closed port
            assert process.poll() is None
            server.answers.set()
            wait_for_answers(server)
            server.answers.clear()
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


@ignored(signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
def test_the_wait_ignores_the_signals_that_the_parent_ignored_except_sigterm() -> None:
    with slow_server() as server, waiting_process(server.url) as process:
        server.answers.set()
        wait_for_answers(server)
        assert is_ignored(process.pid, signal.SIGINT)
        assert is_ignored(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_wait_ends_with_an_error_if_the_server_is_no_longer_listening() -> None:
    with slow_server() as server:
        server.answers.set()
        with waiting_process(server.url) as process:
            wait_for_answers(server)
            server.shutdown()
            server.server_close()
            assert process.wait(60) == 1
            assert process.stderr is not None
            last = process.stderr.read().splitlines()[-1]
            assert last.startswith("error: ")
            assert server.url in last


# A signal can arrive at any line, including the lines that wait for it, so send many signals.
MANY_SIGNALS = """
import os, random, signal, threading, time
from types import SimpleNamespace
from serving.deploy import stop_signal
stop_signal._POLL_SECONDS = 0
stop_signal._Health = lambda *_: SimpleNamespace(check=lambda: None)
def send(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGTERM)
for _ in range(1000):
    stop = stop_signal.StopSignal()
    threading.Thread(target=send, args=(random.uniform(0, 1e-3),)).start()
    try:
        stop.wait("http://127.0.0.1:1")
    except SystemExit:  # the signal arrived before the wait
        pass
"""


def test_a_signal_ends_the_wait_at_any_line() -> None:
    subprocess.run([sys.executable, "-c", MANY_SIGNALS], cwd=ROOT, check=True, timeout=60)


# -- killed processes of a real server ---------------------------------------------------------


@pytest.fixture
def server(bundle: Path, tmp_path: Path) -> Iterator[Server]:
    running = start(bundle, tmp_path / "stderr")
    yield running
    end(running)


def named(server: Server, name: str) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if child.name() == name]


def the_haproxy(server: Server) -> psutil.Process:
    """Return the final HAProxy process. Ray replaces the first one when the replicas are ready."""
    until = time.monotonic() + 30
    while len(found := named(server, "haproxy")) != 1:
        assert time.monotonic() < until, found
        time.sleep(0.2)
    return found[0]


@pytest.mark.slow
def test_a_killed_haproxy_is_restarted_and_a_briefly_hanging_one_is_kept(
    server: Server,
) -> None:
    """`docs/serving.md` reports the measured recovery time."""
    haproxy = the_haproxy(server)
    haproxy.suspend()
    time.sleep(8)
    haproxy.resume()
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    time.sleep(3)
    assert named(server, "haproxy") == [haproxy]
    haproxy.kill()
    until = time.monotonic() + 20  # with Ray's default settings, 28 s or more
    while not is_ready(server.url):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert server.errors.read_text() == ""


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_when_ray_dies_the_server_prints_one_line_and_leaves_no_process(
    server: Server, name: str
) -> None:
    (daemon,) = named(server, name)
    os.kill(daemon.pid, signal.SIGKILL)
    # After a minute, Ray would exit the process with a different message.
    assert server.process.wait(timeout=45) == 2
    (line,) = server.errors.read_text().splitlines()
    assert line.startswith("error: Ray has exited")
    assert [process for process in server.children if process.is_running()] == []


@pytest.mark.slow
def test_a_server_exits_even_if_ray_hangs(server: Server) -> None:
    (raylet,) = named(server, "raylet")
    raylet.suspend()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=90) == 2
    last = server.errors.read_text().splitlines()[-1]
    assert last.startswith("error: Ray did not stop within 30 s")
    assert [process for process in server.children if process.is_running()] == []
