"""`kway serve --no-ray --replicas 2`: the metrics of all workers, lost workers, and signals."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.dispositions import default_signals
from tests.serving.started import Server, as_json, command, counts, end, run, start
from tests.tiny_bundle import write, write_of_texts
from tests.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    bundle = write(tmp_path / "pets")
    folder = tmp_path / "tmp"
    folder.mkdir()
    options = ("--no-ray", "--replicas", 2, "--grpc-port", 0, "--batch-wait", 1)
    with default_signals():
        running = start(bundle, tmp_path / "stderr", *options, temporary=folder)
    yield running
    end(running)


def workers(server: Server) -> dict[int, psutil.Process]:
    """Return the processes that listen, except for the first, which does not accept."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {one.pid: one for one in children if one.net_connections()}


def reporting(server: Server) -> set[int]:
    """Return the workers with gauges on the page."""
    lines = httpx.get(server.metrics, timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith("kway_requests_in_progress{")]
    return {int(line.split('pid="')[1].partition('"')[0]) for line in found}


def test_workers_share_a_port_and_metrics_a_lost_one_is_replaced_and_a_signal_drains_them(
    server: Server, images: list[Path], tmp_path: Path
) -> None:
    def query(class_id: int) -> int:
        body = as_json(images[:1], classes=[class_id])
        return httpx.post(f"{server.url}/v1/query", json=body, timeout=60).status_code

    wait_until(lambda: len(reporting(server)) == 2)
    before = workers(server)
    assert reporting(server) == set(before)
    assert {one.rpartition(":")[2] for one in server.listening} == {
        address.rpartition(":")[2] for address in (server.url, server.grpc)
    }
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(query, [1] * 12)) == {200}
    assert counts(server)["kway_query_requests_total:ok"] == 12
    lost = next(iter(before))
    before[lost].kill()
    wait_until(lambda: len(reporting(server) - {lost}) == 2 and lost not in reporting(server), 150)
    assert len(workers(server)) == 2
    assert counts(server)["kway_query_requests_total:ok"] == 12  # also those of the lost one
    children = psutil.Process(server.process.pid).children(recursive=True)
    with ThreadPoolExecutor(1) as threads:
        in_progress = threads.submit(query, 1)
        time.sleep(0.4)  # less than the wait for a batch
        os.killpg(server.process.pid, signal.SIGHUP)  # as a terminal does that is closed
        assert in_progress.result(60) == 200
    assert server.process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert server.errors.read_text() == ""


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Even while they load the bundle."""
    bundle, folder = write(tmp_path / "pets"), tmp_path / "tmp"
    folder.mkdir()
    arguments = command("serve", bundle, "--no-ray", "--replicas", 2, "--port", 0)
    environment = {**os.environ, "TMPDIR": str(folder)}

    def spawned() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children(recursive=True)
        return [one for one in children if "spawn_main" in " ".join(one.cmdline())]

    with subprocess.Popen(arguments, env=environment) as process:
        wait_until(lambda: len(spawned()) == 2, 150)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert psutil.wait_procs(children, timeout=60)[1] == []
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_workers_that_cannot_load_the_bundle_end_the_server(tmp_path: Path) -> None:
    bundle = write_of_texts(tmp_path / "texts")
    file = bundle / "class_weights.safetensors"  # not verified at the start
    raw = file.read_bytes()
    start_of_rows = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:start_of_rows] + b"\xff" * (len(raw) - start_of_rows))  # NaN
    done = run("serve", bundle, "--no-ray", "--replicas", 2, "--port", 0)
    assert done.returncode == 2
    assert "returns a score of nan" in done.stderr
