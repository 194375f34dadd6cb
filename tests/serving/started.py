"""Start `kway serve` in a separate process, and inspect that server from tests."""

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import httpx
import psutil
import pytest
import typer
from typer.testing import CliRunner, Result

from launch.commands import query
from launch.commands.index import index as index_command
from tests.ending import shared
from tests.noise_images import image
from tests.system.processes import ROOT

_START_SECONDS = 240  # pytest-timeout ends a test after 300 s

COMMAND = """
import sys, typer
from launch.commands import query, serve
app = typer.Typer(pretty_exceptions_enable=False)
app.command("serve")(serve.command)
app.command("query")(query.query)
try:
    app()
except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", COMMAND, *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)


def ask(*arguments: object) -> str:
    """Run `kway query` and return its output."""
    return _run_here(query.query, arguments).stdout


def index_gallery(*arguments: object) -> str:
    """Run `kway index` and return its output. The last line is the summary."""
    ran = _run_here(index_command, arguments)
    return ran.stderr + ran.stdout


def _run_here(function: Callable[..., object], arguments: Sequence[object]) -> Result:
    """Run a command in this process, because starting a new one takes seconds."""
    app = typer.Typer()
    app.command()(function)
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if ran.exception is not None:
        raise ran.exception
    return ran


@dataclass
class Server:
    """A running `kway serve`. `metrics` is the URL of its metrics, and `listening` are the
    addresses that it printed."""

    process: subprocess.Popen[str]
    url: str
    curl: str
    grpc: str
    metrics: str
    listening: list[str]
    children: list[psutil.Process]
    errors: Path


def start(
    bundle: Path,
    errors: Path,
    *options: object,
    start: list[str] | None = None,
    cwd: Path = ROOT,
    temporary: Path | None = None,
) -> Server:
    """Start a server and wait until it is ready; `temporary` is its TMPDIR."""
    arguments = ["serve", str(bundle), "--port", "0", *map(str, options)]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [*start, *arguments] if start else command(*arguments),
            cwd=cwd,
            env=os.environ if temporary is None else {**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            process_group=0,
        )
    assert process.stdout is not None
    too_late = Timer(_START_SECONDS, process.kill)
    too_late.start()
    lines = []
    try:
        while (line := process.stdout.readline()) and not line.startswith("listening: "):
            lines.append(line)
    finally:
        too_late.cancel()
    children = psutil.Process(process.pid).children(recursive=True)

    def value(pattern: str) -> str:
        return found[1] if (found := re.search(pattern, "".join(lines), re.MULTILINE)) else ""

    url = value(r"^ready: (http://\S+)")
    server = Server(
        process,
        url,
        curl=value(r"^(curl .*)"),
        grpc=value(r"gRPC: (\S+)"),
        metrics=value(r"^metrics: (\S+)") or f"{url}/metrics",
        listening=re.findall(r"(\S+) \(", line),
        children=children,
        errors=errors,
    )
    if not line:
        end(server)
        pytest.fail(f"the server did not start: {lines} {errors.read_text()}")
    return server


def end(server: Server) -> int:
    """Stop the server with SIGTERM, kill any processes that remain, and return the server's exit
    code.
    """
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        return server.process.wait(timeout=60)
    finally:
        for process in server.children:
            if process.is_running():
                process.kill()
        server.process.kill()
        assert server.process.stdout is not None
        server.process.stdout.close()


class SharedServer:
    """A server shared by several test files. The first test that needs it starts it. If a test
    stops it, the next test that needs it restarts it.
    """

    def __init__(self, launch: Callable[[], Server]) -> None:
        self._launch = launch
        self._server: Server | None = None
        self._has_failed = False

    def get(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            assert not self._has_failed, "the server did not start for an earlier test"
            self.close()
            self._has_failed = True  # until it has started, because each attempt may take minutes
            self._server = self._launch()
            self._has_failed = False
            shared.add(self._server.process.pid)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            end(self._server)


def write_images(folder: Path) -> list[Path]:
    paths = [folder / f"{index}.png" for index in range(6)]
    for index, path in enumerate(paths):
        path.write_bytes(image(index))
    return paths


def as_json(paths: list[Path], **fields: object) -> dict[str, object]:
    images = [base64.b64encode(path.read_bytes()).decode() for path in paths]
    return {"images": images, **fields}


def scores_of(answer: dict) -> list[float]:
    return [v["score"] for result in answer["results"] for v in result["verdicts"]]


def counts(server: Server, token: str = "none") -> dict[str, float]:
    """Return the counts of all replicas, by name and outcome, without Ray's prefix."""
    headers = {"authorization": f"Bearer {token}"}
    page = httpx.get(server.metrics, headers=headers, timeout=30)
    assert page.status_code == 200, page.text
    found: dict[str, float] = {}
    for line in page.text.splitlines():
        parts = re.fullmatch(r"(?:ray_)?(kway_\w+)(?:\{(.*)\})? (\S+)", line)
        if parts is not None:
            outcome = re.search(r'outcome="(\w+)"', parts[2] or "")
            key = f"{parts[1]}:{outcome[1]}" if outcome else parts[1]
            found[key] = found.get(key, 0) + float(parts[3])
    return found


def of_each(server: Server, read: Callable[[psutil.Process], Any]) -> list[Any]:
    """Call `read` for each process of the server and return the results. Processes that exit in the
    meantime are skipped.
    """
    found = []
    server_process = psutil.Process(server.process.pid)
    for process in [server_process, *server_process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found.append(read(process))
    return found


def replicas_of(server: Server) -> dict[int, psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {child.pid: child for child in children if "ServeReplica" in child.name()}
