"""A Ray cluster of several raylets on this machine, whose raylets and workers can be killed.

The cluster and its drivers run in processes of their own, because the settings of Ray apply to a
whole process. The cluster ends when this process does.
"""

import json
import os
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.ranks import forked

_STORE_BYTES = 80 << 20


@dataclass
class RayCluster:
    """A running cluster. environment: the variables that drivers need."""

    environment: dict[str, str]
    _process: subprocess.Popen[str]
    address: str = ""
    raylets: list[int] = field(default_factory=list)

    def resize(self, num_workers: int) -> None:
        """Start or kill raylets, with one CPU each, until there are `num_workers`."""
        while len(self.raylets) > num_workers:
            self.kill_raylet()
        for _ in range(num_workers - len(self.raylets)):
            self.raylets.append(self._ask("add"))

    def kill_raylet(self) -> None:
        """Kill the oldest raylet with SIGKILL. Its workers then exit."""
        psutil.Process(self.raylets.pop(0)).kill()

    def workers(self) -> list[psutil.Process]:
        """Return the processes that are running a task."""
        found = []
        for raylet in self.raylets:
            for child in psutil.Process(raylet).children():
                with suppress(psutil.NoSuchProcess):
                    if "".join(child.cmdline()[:1]).startswith("ray::_call"):
                        found.append(child)
        return found

    def _ask(self, command: str):
        print(command, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def ray_cluster(folder: Path, **variables: str) -> Iterator[RayCluster]:
    """Start a cluster with a head that runs no tasks. `variables` are set in all its processes."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Listen only on the loopback interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": "0",
        # The head declares a raylet dead after five failed checks. By default, that takes 15 s.
        "RAY_health_check_period_ms": "300",
        **variables,
    }
    command = [sys.executable, "-P", "-m", "tests.data.ray_cluster"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    root = Path(__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": str(root), **environment}
    with (
        (folder / "cluster.log").open("w") as log,
        subprocess.Popen(command, env=variables, stderr=log, **pipes) as process,
    ):
        cluster = RayCluster(environment, process)
        try:
            cluster.address = cluster._ask("address")
            yield cluster
        finally:
            process.stdin.close()
            process.wait(60)


class Driver:
    """A process that runs `function(*arguments)` with the environment of `cluster`. `log` contains
    its standard error."""

    def __init__(
        self, cluster: RayCluster, folder: Path, function: Callable[..., None], *arguments: Any
    ) -> None:
        self._errors = folder / f"driver-{time.monotonic_ns()}.txt"
        self.log = self._errors.with_suffix(".log")
        files = str(self._errors), str(self.log)
        self.process = forked(_run, cluster.environment, files, function, arguments)
        self.process.start()

    def finish(self) -> str:
        """Return the error with which the function failed, or an empty text."""
        self.process.join(240)
        assert self.process.exitcode == 0, self.log.read_text()
        return self._errors.read_text()


def _run(
    environment: dict[str, str],
    files: tuple[str, str],
    function: Callable[..., None],
    arguments: Any,
) -> None:
    errors, log = files
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os.environ.update(environment)
    text = ""
    try:
        function(*arguments)
    except (ValueError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    Path(errors).write_text(text)


def _main() -> None:
    import tempfile

    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    output = os.dup(1)
    os.dup2(2, 1)  # Ray prints to stdout

    # Unix domain sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder  # does not replace the cluster that `auto` refers to
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for line in sys.stdin:
                answer: object = cluster.address
                if line.strip() == "add":
                    node = cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
                    (raylet,) = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
                    answer = raylet.process.pid
                os.write(output, json.dumps(answer).encode() + b"\n")
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    _main()
