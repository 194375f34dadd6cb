"""Start servers in separate processes and stop them after the measurement."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.addresses import free_port

_START_SECONDS, _STOP_SECONDS = 60, 30


@dataclass(frozen=True)
class Server:
    """The port of a server and the process ID of its main process."""

    port: int
    pid: int


@contextmanager
def kway(bundle: Path, *options: str) -> Iterator[Server]:
    """Start `kway serve` with one replica."""
    command = [sys.executable, "-P", "-m", "launch", "serve", str(bundle), "--port", "0", *options]
    with _ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("ready: "):
            raise RuntimeError("kway serve did not start: see its error above")
        yield Server(int(ready.split()[1].rsplit(":", 1)[1]), process.pid)


@contextmanager
def module(
    name: str, kind: str, bundle: Path, *, python: str | Path = sys.executable
) -> Iterator[Server]:
    """Run a benchmark module with the arguments KIND BUNDLE PORT."""
    port = free_port("127.0.0.1", 0)
    command = [str(python), "-m", name, kind, str(bundle), str(port)]
    with _ended(subprocess.Popen(command)) as process:
        asyncio.run(_listens(port, process))
        yield Server(port, process.pid)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Terminate a process and its remaining children: LitServe's workers outlive it."""
    with process:
        try:
            yield process
        finally:
            children = []
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                process.wait(_STOP_SECONDS)
            _, left = psutil.wait_procs(children, timeout=1)
            for child in left:
                child.kill()


async def _listens(port: int, process: subprocess.Popen[str]) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError as error:
                if process.poll() is not None:
                    raise RuntimeError("the server did not start: see its error above") from error
                await asyncio.sleep(0.1)
                continue
            writer.close()
            return
