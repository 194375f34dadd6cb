"""Slots for requests and uploads, the start of a server, and waiting for a signal."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from serving import on_ray, on_uvicorn
from serving.config import ServingConfig
from serving.on_uvicorn import Application
from serving.temporary import temporary_folder
from tests.dispositions import ignored, is_ignored
from tests.quiet_server import QuietServer
from tests.serving.in_process import application, ask, listening, occupied, refusal
from tests.serving.started import end, start
from tests.system.processes import ROOT
from tests.tiny_bundle import write
from tests.waiting import wait_until

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
    with listening(application(bundle, max_requests=1, batch_wait_seconds=4)) as url:
        with occupied(url):
            wait_until(lambda: status_of(url, BOB) == (429, "too_busy"))
            with begun(url, *BODIES[0]) as other:
                assert answer_of(other) == (429, "too_busy")
            assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: status_of(url, BOB) == (400, "empty_body"))


# -- start and signals -------------------------------------------------------------------------


def test_requests_get_503_with_retry_after_until_the_model_is_loaded(bundle: Path) -> None:
    loading = Application(bundle, ServingConfig(), loads_first=False)
    answer = ask(loading, "GET", "/health")
    assert refusal(answer) == (503, "loading")
    assert answer.headers["retry-after"] == "1"


WAIT = """
import sys
from serving import stop_signal
stop_signal._POLL_SECONDS = 0.05
stop = stop_signal.StopSignal()
try:
    stop.wait(stop_signal.Listening(sys.argv[1], lost_seconds=1.0).check)
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
    """Start a process that waits for a signal while something is listening at `url`."""
    command = [sys.executable, "-c", WAIT, url]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@ignored(signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
def test_the_wait_ignores_the_signals_that_the_parent_ignored_except_sigterm() -> None:
    with slow_server() as server, waiting_process(server.url) as process:
        server.answers.set()
        wait_until(lambda: server.num_answered > 2)
        assert is_ignored(process.pid, signal.SIGINT)
        assert is_ignored(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_wait_ends_with_an_error_if_the_server_is_no_longer_listening() -> None:
    with slow_server() as server:
        server.answers.set()
        with waiting_process(server.url) as process:
            wait_until(lambda: server.num_answered > 2)
            server.shutdown()
            server.server_close()
            assert process.wait(60) == 1
            assert process.stderr is not None
            (line,) = process.stderr.read().splitlines()
            assert line.startswith("error: ")
            assert server.url in line


# A signal can arrive at any line, including the lines that wait for it, so send many signals.
MANY_SIGNALS = """
import os, random, signal, threading, time
from serving import stop_signal
stop_signal._POLL_SECONDS = 0
def send(after):
    time.sleep(after)
    os.kill(os.getpid(), signal.SIGTERM)
for _ in range(1000):
    stop = stop_signal.StopSignal()
    threading.Thread(target=send, args=(random.uniform(0, 1e-3),)).start()
    try:
        stop.wait(lambda: None)
    except SystemExit:  # the signal arrived before the wait
        pass
"""


def test_a_signal_ends_the_wait_at_any_line() -> None:
    subprocess.run([sys.executable, "-c", MANY_SIGNALS], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("replacement", [RuntimeError("cannot build a schema"), SystemExit(1)])
def test_startup_ends_cleanly_if_a_library_replaces_the_exception_of_the_signal(
    tmp_path: Path,
    kway: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    replacement: BaseException,
) -> None:
    handlers = {number: signal.getsignal(number) for number in (2, 15, 1)}

    @contextmanager
    def interrupted(*_: object) -> Iterator[None]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise replacement from None
        yield

    monkeypatch.setattr(on_uvicorn, "running", interrupted)
    try:
        assert kway("serve", write(tmp_path / "bundle"), "--port", 0, "--no-ray") == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# -- temporary folders -------------------------------------------------------------------------

HOLD = """
import sys
from serving.temporary import temporary_folder
with temporary_folder("kway-test-") as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_temporary_folder_is_removed_after_its_owner_is_killed(tmp_path: Path) -> None:
    """A process that outlives the owner for a while may still write to the folder."""
    for kills in (False, True):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        remover = psutil.Process(process.pid).children()
        assert folder.parent == tmp_path
        assert remover
        if kills:
            process.kill()
            process.communicate(timeout=60)
            wait_until(lambda folder=folder: not folder.exists())  # type: ignore[misc]
            (folder / "logs").mkdir(parents=True)
        else:
            process.communicate(timeout=60)
        assert psutil.wait_procs(remover, timeout=60)[1] == []
        assert list(tmp_path.iterdir()) == []


def test_a_signal_right_after_the_creation_of_a_temporary_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def interrupted(self: Path, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        raise SystemExit(0)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(SystemExit), temporary_folder("kway-test-"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_ray_needs_free_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=100 * 2**20))
    with (
        pytest.raises(OSError, match=f"{tmp_path} has 100 MiB of free space"),
        on_ray.running(tmp_path / "pets", ServingConfig()),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


# -- the daemons of Ray ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_when_ray_dies_the_server_exits_and_leaves_no_process(
    bundle: Path, tmp_path: Path, name: str
) -> None:
    server = start(bundle, tmp_path / "stderr")
    try:
        (daemon,) = [child for child in server.children if child.name() == name]
        daemon.kill()
        assert server.process.wait(timeout=200) == 1
        # An agent of Ray first tries to reach the others for a minute.
        assert psutil.wait_procs(server.children, timeout=150)[1] == []
    finally:
        end(server)
