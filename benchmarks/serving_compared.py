"""CPU time and requests/s of `kway serve`, a plain FastAPI application and LitServe.

All servers use the same bundle, and each runs the model in one process with one torch thread:
several threads would add CPU time by spinning while they wait for each other. The servers take
turns. The CPU time of a server covers all of its processes, including idle ones and those of Ray
and HAProxy. The client runs on the same cores.
"""

import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.serving_bundles import name_of, write_random
from benchmarks.serving_requests import SMALL, SMALL_SIDE, TRIVIAL, load, random_jpeg
from benchmarks.serving_started import Server, kway, module
from benchmarks.timing import Row, rate_row, ratio_row, take_turns

_CLIENTS = (1, 8, 64)
_CLASSES = 100
_PEERS = {"fastapi": "FastAPI + uvicorn", "litserve": "LitServe"}


@dataclass(frozen=True)
class _Case:
    """A model, the side of its images, and the requests per turn for each number of clients."""

    what: str
    network: dict[str, object]
    side: int
    requests: tuple[int, int, int]
    seconds: float


_CASES = (
    _Case("negligible model", TRIVIAL, 8, (300, 600, 1280), 40),
    _Case("ResNet-18", SMALL, SMALL_SIDE, (8, 32, 64), 90),
)


def peers() -> Iterator[Row]:
    """Compare kway's CPU time and requests/s with those of each peer."""
    for case in _CASES:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            bundle = Path(name) / "bundle"
            write_random(bundle, case.network, _CLASSES, size=case.side)
            servers = {"kway": stack.enter_context(kway(bundle, "--threads", "1"))}
            for kind in _PEERS:
                peer = module("benchmarks.serving_peers", kind, bundle)
                servers[kind] = stack.enter_context(peer)
            body = _query(case.side)
            _check_same_work(servers, body)
            for clients, count in zip(_CLIENTS, case.requests, strict=True):
                yield from _compare(case, servers, _request(body), clients, count)


def _compare(
    case: _Case, servers: dict[str, Server], request: bytes, clients: int, count: int
) -> Iterator[Row]:
    turns = {
        name: _Turns(load(server.port, request, count, clients), server.pid)
        for name, server in servers.items()
    }
    walls = take_turns(turns, title=f"{case.what}, {clients}", seconds=case.seconds)
    for kind, peer in _PEERS.items():
        label = f"{case.what}, {clients} clients"
        ours, theirs = (np.array(turns[name].cpu_seconds[1:]) / count for name in ("kway", kind))
        yield ratio_row(f"CPU time per request, kway / {peer}", label, ours, theirs)
        yield rate_row(
            f"requests/s, kway / {peer}",
            label,
            walls["kway"],
            walls[kind],
            at_least=None,
            count=count,
            unit="requests/s",
        )


@dataclass
class _Turns:
    """A load, and the CPU seconds of the server's processes in each turn."""

    load: Callable[[], None]
    pid: int
    cpu_seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        before = _cpu_seconds(self.pid)
        self.load()
        after = _cpu_seconds(self.pid)
        self.cpu_seconds.append(sum(after[one] - before.get(one, 0.0) for one in after))


def _cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process and its descendants by process ID."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _query(side: int) -> bytes:
    image = base64.b64encode(random_jpeg(side)).decode()
    return json.dumps({"classes": [name_of(1)], "images": [image], "recall": 0.9}).encode()


def _request(body: bytes) -> bytes:
    head = "POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _check_same_work(servers: dict[str, Server], body: bytes) -> None:
    """Check that all servers return the same score.

    Also waits for LitServe, which starts listening before its model is loaded.
    """
    scores = [_score(server.port, body) for server in servers.values()]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4, atol=1e-4)


def _score(port: int, body: bytes) -> float:
    url, headers = f"http://127.0.0.1:{port}/v1/query", {"Content-Type": "application/json"}
    for _ in range(100):
        response = httpx.post(url, content=body, headers=headers, timeout=60)
        if response.status_code != 503:
            break
        time.sleep(0.2)
    response.raise_for_status()
    score: float = response.json()["results"][0]["verdicts"][0]["score"]
    return score
