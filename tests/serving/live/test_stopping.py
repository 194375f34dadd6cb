"""Signals, including SIGKILL, and two servers on one machine.

pytest collects these tests last, because they stop servers that the other files in this folder use.
"""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from tests.dispositions import default_signals, is_ignored
from tests.serving.started import Server, SharedServer, command
from tests.waiting import wait_until


def handles_sigterm(pid: int) -> bool:
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
@default_signals()
def test_a_signal_during_startup_exits_with_0_and_leaves_no_process(
    bundle: Path, runner: str, temporary_folder: Path, number: signal.Signals
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
        wait_until(lambda: handles_sigterm(process.pid), 150)
        if runner == "ray":  # the process that removes the folder, and the first one of Ray
            wait_until(lambda: len(of_server.children(recursive=True)) >= 2, 150)
        children = of_server.children(recursive=True)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == 0
    _, remaining = psutil.wait_procs(children, timeout=60)
    assert remaining == []


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
    _, remaining = psutil.wait_procs(children, timeout=60)
    assert remaining == []
    assert list(temporary_folder.iterdir()) == []
    assert client.get("/v1/model").status_code == 200


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
        os.killpg(server.process.pid, signal.SIGTERM)
    return found


def test_a_server_ignores_sigint_if_its_parent_did(server: Server, client: httpx.Client) -> None:
    assert is_ignored(server.process.pid, signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    assert client.get("/v1/model").status_code == 200


def test_sigterm_to_the_process_group_under_load_never_causes_404_and_leaves_no_process(
    server: Server, client: httpx.Client
) -> None:
    errors = server.errors.read_text()
    assert asyncio.run(statuses_during_shutdown(server, client)) <= {(200, None), (503, "1")}
    assert server.process.wait(timeout=60) == 0
    assert [process for process in server.children if process.is_running()] == []
    assert server.errors.read_text() == errors
