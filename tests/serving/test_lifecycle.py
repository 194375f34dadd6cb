"""Slots for requests and uploads, the start of a server, and waiting for a signal."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb

from serving import on_ray
from serving.config import ServingConfig
from serving.inference.methods import InferenceMethods
from serving.metrics import Metrics
from serving.on_uvicorn import Application
from serving.tokens import Clients
from serving.versions import ServedModel
from tests.noise_images import image
from tests.serving.in_process import (
    Call,
    Recorder,
    application,
    ask,
    listening,
    occupied,
    refusal,
    write_tokens,
)
from tests.serving.started import end, start
from tests.system.processes import ROOT
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


LIMITS = {
    "max_requests": 4,  # three per client
    "request_timeout_seconds": 4,
    "batch_wait_seconds": 1,
    "max_uploads": 6,
    "max_body_bytes": 100_000,
    "max_upload_bytes": 200_000,
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    write_tokens(tokens, ALICE, BOB)
    return tokens


@pytest.fixture(scope="module")
def url(bundle: Path, tokens: Path) -> Iterator[str]:
    with listening(application(bundle, token_file=tokens, **LIMITS)) as found:
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


def test_a_client_at_its_limit_of_requests_leaves_requests_for_others(url: str) -> None:
    with ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(occupied(url, Authorization=f"Bearer {ALICE}"))
        wait_until(lambda: status_of(url, ALICE) == (429, "too_many_requests"))
        assert status_of(url, BOB) == (400, "empty_body")
    wait_until(lambda: status_of(url, ALICE) == (400, "empty_body"))


def test_grpc_calls_have_the_same_limits_per_client(bundle: Path, tokens: Path) -> None:
    config = ServingConfig(threads=1, token_file=tokens, **LIMITS)  # type: ignore[arg-type]
    model = ServedModel(bundle, config, Metrics(Recorder()))
    methods = InferenceMethods(model, Clients(tokens))

    async def codes(*calls: tuple[str, int]) -> list[str]:
        """Make all calls at the same time, each with a token and a size, and return their codes."""
        contexts = [Call({"authorization": f"Bearer {token}"}) for token, _ in calls]
        requests = [
            methods.call("ModelInfer", request_of_size(size), context)
            for context, (_, size) in zip(contexts, calls, strict=True)
        ]
        await asyncio.gather(*requests)
        return ["OK" if one.code is None else one.code.name for one in contexts]

    for own, size in ((4, 10), (2, 80_000)):
        found = asyncio.run(codes(*[(ALICE, size)] * own, (BOB, size)))
        assert found == [*["OK"] * (own - 1), "RESOURCE_EXHAUSTED", "OK"]


def request_of_size(num_bytes: int) -> bytes:
    found = pb.ModelInferRequest(model_name="pets", id="x" * num_bytes)
    found.inputs.add(name="images", datatype="BYTES", shape=[1])
    found.inputs.add(name="class_ids", datatype="INT64", shape=[1])
    file = image(0)
    found.raw_input_contents.append(len(file).to_bytes(4, "little") + file)
    found.raw_input_contents.append((2).to_bytes(8, "little"))
    return found.SerializeToString()


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
