"""Signals, including SIGKILL, and two servers on one machine.

pytest collects these tests last, because they stop servers that the other files in this folder use.
"""

import asyncio
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.dispositions import default_signals, is_handled, is_ignored
from tests.serving.live.servers import REPLICAS, TIMEOUT
from tests.serving.started import (
    Server,
    SharedServer,
    as_json,
    command,
    end,
    replicas_of,
    scores_of,
    start,
)
from tests.waiting import wait_until


@default_signals()
def test_sigterm_during_startup_exits_with_0_and_leaves_no_process(
    bundle: Path, runner: str, temporary_folder: Path
) -> None:
    options = ("--no-ray",) if runner == "no-ray" else ()
    arguments = command("serve", bundle, "--port", 0, *options)
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        process_group=0,
        env={**os.environ, "TMPDIR": str(temporary_folder)},
    ) as process:
        of_server = psutil.Process(process.pid)
        wait_until(lambda: is_handled(process.pid, signal.SIGTERM), 150)
        if runner == "ray":  # the process that removes the folder, and the first one of Ray
            wait_until(lambda: len(of_server.children(recursive=True)) >= 2, 150)
        children = of_server.children(recursive=True)
        if runner == "ray":  # its processes are in the same group
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    _, remaining = psutil.wait_procs(children, timeout=60)
    assert remaining == []


@pytest.mark.slow
def test_two_servers_serve_their_own_models_and_a_killed_server_leaves_nothing_behind(
    client: httpx.Client, open_server: SharedServer, runner: str, temporary_folder: Path
) -> None:
    other = open_server.get()
    with httpx.Client(base_url=other.url, timeout=30) as open_client:
        for one, name in ((client, "pets"), (open_client, "others".ljust(251, "-"))):
            assert {one.get("/v1/model").json()["bundle"] for _ in range(10)} == {name}
    children = psutil.Process(other.process.pid).children(recursive=True)
    assert bool(list(temporary_folder.glob("kway-ray-*"))) == (runner == "ray")
    other.process.kill()
    # An agent of Ray first tries to reach the others for a minute.
    _, remaining = psutil.wait_procs(children, timeout=180)
    assert remaining == []
    wait_until(lambda: not list(temporary_folder.iterdir()))
    assert client.get("/v1/model").status_code == 200


def test_queries_are_answered_although_a_replica_is_killed_and_it_is_replaced(
    server: Server, client: httpx.Client, runner: str, images: list[Path]
) -> None:
    if runner == "no-ray":
        pytest.skip("there are no replicas")
    body = as_json(images[:1], classes=[2])
    expected = scores_of(client.post("/v1/query", json=body).json())
    before = replicas_of(server)

    def query(number: int) -> list[float]:
        if number == 10:
            next(iter(before.values())).kill()
        for _ in range(100):
            with suppress(httpx.TransportError):
                answer = client.post("/v1/query", json=body)
                if answer.status_code == 200:
                    return scores_of(answer.json())
                assert answer.status_code in (429, 500, 503)  # 500: the replica had the request
            time.sleep(0.2)
        raise AssertionError("no answer")

    with ThreadPoolExecutor(4) as threads:
        for scores in threads.map(query, range(40)):
            assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
    wait_until(lambda: len(replicas_of(server)) == REPLICAS, 120)
    assert set(replicas_of(server)) != set(before)


def test_without_an_available_replica_a_request_times_out(
    server: Server, client: httpx.Client, runner: str
) -> None:
    if runner == "no-ray":
        pytest.skip("there are no replicas")
    replicas = replicas_of(server).values()
    started = time.monotonic()
    for replica in replicas:
        replica.suspend()
    try:
        answer = client.get("/v1/model")
    finally:
        for replica in replicas:
            replica.resume()
    assert answer.status_code == 408
    assert "text/plain" in answer.headers["content-type"]  # of Ray's proxy
    assert TIMEOUT + 5 <= time.monotonic() - started < 2 * (TIMEOUT + 5)


async def statuses_during_shutdown(
    server: Server, client: httpx.Client
) -> set[tuple[int, str | None]]:
    """Return the status and Retry-After header of every response that concurrent clients receive
    while the server shuts down.
    """
    found: set[tuple[int, str | None]] = set()

    async def poll(one: httpx.AsyncClient) -> None:
        while server.process.poll() is None:
            try:
                answer = await one.get("/v1/model")
            except httpx.TransportError:  # connection refused
                await asyncio.sleep(0.01)
            else:
                found.add((answer.status_code, answer.headers.get("retry-after")))

    async with (
        asyncio.timeout(120),
        httpx.AsyncClient(base_url=server.url, headers=client.headers, timeout=30) as many,
        asyncio.TaskGroup() as all_,
    ):
        for _ in range(8):
            all_.create_task(poll(many))
        while not found:
            await asyncio.sleep(0.01)
        server.process.terminate()
    return found


def test_a_server_ignores_sigint_if_its_parent_did(server: Server, client: httpx.Client) -> None:
    assert is_ignored(server.process.pid, signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    assert client.get("/v1/model").status_code == 200


def test_sigterm_under_load_never_causes_an_error_of_kway_and_leaves_no_process(
    server: Server, client: httpx.Client, runner: str
) -> None:
    errors = server.errors.read_text()
    expected = {(200, None), (503, "1")}
    if runner == "ray":  # its proxy no longer knows the application
        expected.add((404, None))
    assert asyncio.run(statuses_during_shutdown(server, client)) <= expected
    assert server.process.wait(timeout=60) == 0
    assert [process for process in server.children if process.is_running()] == []
    assert server.errors.read_text() == errors


@pytest.mark.slow
def test_a_server_with_haproxy_answers_what_it_has_received_and_leaves_no_process(
    bundle: Path, images: list[Path], tmp_path: Path
) -> None:
    server = start(bundle, tmp_path / "stderr", "--high-throughput", "--batch-wait", 2)
    query = partial(httpx.post, f"{server.url}/v1/query", timeout=60)
    body = as_json(images[:1], classes=[2])
    try:
        assert query(json=body).status_code == 200
        with ThreadPoolExecutor(1) as threads:
            in_progress = threads.submit(query, json=body)
            time.sleep(1)  # less than the wait for a batch
            server.process.terminate()
            assert in_progress.result(60).status_code == 200
        assert server.process.wait(timeout=25) == 0  # less than the limit of 30 s
        assert psutil.wait_procs(server.children, timeout=10)[1] == []
        assert "error" not in server.errors.read_text()
    finally:
        end(server)
