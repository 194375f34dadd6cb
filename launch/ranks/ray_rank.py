"""A rank on a Ray cluster: a subprocess of an actor."""

import os
import queue
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import NamedTuple

import ray

from launch.ranks.stop import end_processes

_POLL_SECONDS = 1.0
_STOP_SECONDS = 5
_MAX_QUEUED_LINES = 1000
_MAX_LINE_BYTES = 1 << 16
_PACKAGES = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ranks:
    """`num_ranks` processes that run `python -m module arguments…` in the folder `cwd`.

    result_option: rank 0 gets this option with the path of a temporary file, to which it may write
    a result. gpu: True gives each rank a GPU, and None does so if the cluster has any. threads:
    OMP_NUM_THREADS of each rank.
    """

    module: str
    arguments: tuple[str, ...]
    num_ranks: int
    result_option: str
    gpu: bool | None = None
    threads: int = 1
    cwd: str = field(default_factory=os.getcwd)


class Place(NamedTuple):
    node: str
    host: str
    port: int  # a free port
    gpus: list[str]


class Seen(NamedTuple):
    """New output of a rank, and its exit code and result if it has exited."""

    output: str
    code: int | None
    result: str


class RankActor:
    """Runs a rank as a subprocess, so that the rank has an exit code of its own."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="kway-")
        self._result = Path(self._folder.name) / "result"
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_QUEUED_LINES)
        self._stopped = False

    def place(self) -> Place:
        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        gpus = [str(gpu) for gpu in context.get_accelerator_ids()["GPU"]]
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def start(self, ranks: Ranks, environment: dict[str, str]) -> None:
        if not Path(ranks.cwd).is_dir():
            raise ValueError(
                f"{ranks.cwd} does not exist on the node {socket.gethostname()}: run the command "
                "in a folder that all nodes share"
            )
        # If this process is killed while the rank starts, the rank compares this with its parent.
        arguments = [f"--launcher={os.getpid()}", *ranks.arguments]
        if environment["RANK"] == "0":
            arguments.insert(0, f"{ranks.result_option}={self._result}")
        # The actor imports kway from a path that may not be in the node's PYTHONPATH.
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: see `run_ranks`
            [sys.executable, "-P", "-u", "-m", ranks.module, *arguments],
            cwd=ranks.cwd,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MAX_LINE_BYTES):
            self._lines.put(line)

    def poll(self) -> Seen:
        """Wait for new output for at most a second."""
        lines = []
        with suppress(queue.Empty):
            lines.append(self._lines.get(timeout=_POLL_SECONDS))
            while len(lines) < _MAX_QUEUED_LINES:
                lines.append(self._lines.get_nowait())
        output = b"".join(lines).decode(errors="replace")
        code = None if lines else self._process.poll()
        if code is not None and self._stopped:
            code = -signal.SIGTERM
        result = self._result.read_text() if code == 0 and self._result.exists() else ""
        return Seen(output, code, result)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._stopped = True
            end_processes([self._process], signal.SIGTERM, _STOP_SECONDS)
