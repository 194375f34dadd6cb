"""How a server starts and ends: by signals, by force, and next to another one.

Collected last, because these tests end the servers that the other files of this folder ask.
"""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving.started import Server, SharedServer, command


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_a_signal_during_the_start_ends_it_with_code_0_and_leaves_no_process(
    bundle: Path, number: signal.Signals
) -> None:
    arguments = command("serve", bundle, "--port", 0)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, process_group=0) as process:
        deadline = time.monotonic() + 60
        children: list[psutil.Process] = []
        while len(children) < 2 and time.monotonic() < deadline:  # clean-up is the first
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        assert process.wait(timeout=60) == 0
    _, left = psutil.wait_procs(children, timeout=5)
    assert left == []


def test_two_servers_answer_with_their_own_models_and_one_that_is_killed_leaves_nothing(
    server: Server, client: httpx.Client, open_server: SharedServer, temporary_folder: Path
) -> None:
    other = open_server.get()
    with httpx.Client(base_url=other.url, timeout=30) as open_client:
        for one, name in ((client, "pets"), (open_client, "others")):
            assert {one.get("/v1/model").json()["bundle"] for _ in range(10)} == {name}
    children = psutil.Process(other.process.pid).children(recursive=True)
    assert list(temporary_folder.glob("kway-ray-*"))
    other.process.kill()
    _, left = psutil.wait_procs(children, timeout=30)
    assert left == []
    assert list(temporary_folder.iterdir()) == []
    assert client.get("/v1/model").status_code == 200


async def statuses_until_it_ends(
    server: Server, client: httpx.Client
) -> set[tuple[int, str | None]]:
    """Status and Retry-After of every answer to many clients while the server shuts down."""
    found: set[tuple[int, str | None]] = set()

    async def ask_on(one: httpx.AsyncClient) -> None:
        while server.process.poll() is None:
            try:
                answer = await one.get("/v1/model")
            except httpx.TransportError:  # refused
                await asyncio.sleep(0.01)
            else:
                found.add((answer.status_code, answer.headers.get("retry-after")))

    async with (
        httpx.AsyncClient(base_url=server.url, headers=client.headers, timeout=30) as many,
        asyncio.TaskGroup() as all_,
    ):
        for _ in range(8):
            all_.create_task(ask_on(many))
        while not found:
            await asyncio.sleep(0.01)
        os.killpg(server.process.pid, signal.SIGTERM)
    return found


def test_sigterm_to_the_process_group_under_load_is_never_answered_404_and_leaves_no_process(
    server: Server, client: httpx.Client
) -> None:
    shown = server.errors.read_text()
    assert asyncio.run(statuses_until_it_ends(server, client)) <= {(200, None), (503, "1")}
    assert server.process.wait(timeout=60) == 0
    assert [process for process in server.children if process.is_running()] == []
    assert server.errors.read_text() == shown
