"""The collectives that kway uses, run by ranks in separate processes."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launch.doctor.check import Finding, Workload, error, in_gib, ok, warning

# Longer than the timeout of a collective, 10 s (`rank.py`), because importing torch can also take
# a long time, especially with a cold page cache.
_TIMEOUT_SECONDS = 60
_LONGEST = 160


@dataclass(frozen=True)
class _Rank:
    process: "subprocess.Popen[bytes]"
    stdout: Path
    stderr: Path

    def completed(self) -> dict[str, dict[str, Any]]:
        """Map the names of the collectives that the rank has completed to its records, in order."""
        lines = self.stdout.read_text(encoding="utf-8").splitlines()
        return {record["done"]: record for record in map(json.loads, lines)}

    def last_error(self) -> str:
        """Return the last line of the rank's traceback, shortened."""
        lines = self.stderr.read_text(errors="replace").strip().splitlines()
        last = (lines or ["no error message"])[-1]
        return re.sub(r"\[enforce fail at [^]]*\] ", "", last)[:_LONGEST]


def gloo(workload: Workload) -> Iterator[Finding]:
    """Check every collective on the CPU, with gloo."""
    yield smoke_test("gloo", workload.ranks)


def nccl(workload: Workload) -> Iterator[Finding]:
    """Check every collective on the GPUs, with NCCL and one rank per GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if count == 1:
        # NCCL does not support two ranks on one device.
        finding = smoke_test("nccl", 1)
        if finding.level == "ok":
            finding = ok("NCCL", f"{finding.found}; with one GPU, no data is exchanged")
        yield finding
    else:
        yield smoke_test("nccl", count)


def smoke_test(backend: str, size: int, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> Finding:
    """Run every collective on `size` ranks. If one fails or hangs, the finding names it."""
    import torch.distributed as dist

    topic = {"gloo": "gloo", "nccl": "NCCL"}[backend]
    started = time.monotonic()
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        # Pass the listening socket to the store, so that no other process can take the port.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        folder = Path(stack.enter_context(TemporaryDirectory()))
        ranks = [_start(stack, folder, backend, rank, size, store.port) for rank in range(size)]
        _wait(ranks, started + timeout_seconds)
        seconds = time.monotonic() - started
        return _verdict(topic, ranks, seconds)


def _start(stack: ExitStack, folder: Path, backend: str, rank: int, size: int, port: int) -> _Rank:
    stdout, stderr = folder / f"{rank}.out", folder / f"{rank}.err"
    command = [sys.executable, "-P", "-m", "launch.doctor.rank"]
    arguments = [str(port), str(rank), str(size), backend]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen([*command, *arguments], stdout=out, stderr=err)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return _Rank(process, stdout, stderr)


def _wait(ranks: list[_Rank], deadline: float) -> None:
    """Wait until all ranks have exited, one has failed, or the deadline has passed."""
    while time.monotonic() < deadline:
        codes = [rank.process.poll() for rank in ranks]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def _verdict(topic: str, ranks: list[_Rank], seconds: float) -> Finding:
    from launch.doctor.rank import names

    expected = list(names())
    for number, rank in enumerate(ranks):
        done = rank.completed()
        code = rank.process.poll()
        if code == 0:
            continue
        missing = next((name for name in expected if name not in done), "speed test")
        at = f"rank {number} of {len(ranks)}, {missing}" if done else f"rank {number}, startup"
        what = "hangs" if code is None else rank.last_error()
        if code is None and any(other.process.poll() not in (None, 0) for other in ranks):
            continue  # blocked by the rank that failed
        return error(topic, f"{at}: {what}", _remedy(topic))
    speed = ranks[0].completed()["speed"]["bytes_per_second"]
    line = f"{len(ranks)} ranks: all {len(expected)} collectives passed in {seconds:.1f} s"
    line += f"; all_reduce {in_gib(speed)}/s"
    if topic == "NCCL" and len(ranks) > 1 and speed < 1 << 30:
        return warning(topic, line, "slow for GPUs: check peer access and run with NCCL_DEBUG=INFO")
    return ok(topic, line)


def _remedy(topic: str) -> str:
    if topic == "gloo":
        return "set GLOO_SOCKET_IFNAME to an interface that is up (lo for a single machine)"
    return "run again with NCCL_DEBUG=WARN; try NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1"
