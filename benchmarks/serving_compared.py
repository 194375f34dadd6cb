"""CPU time, requests/s and latencies of `kway serve`, a plain FastAPI application, LitServe and
BentoML.

All servers use the same bundle, and each runs the model in one process with one torch thread:
several threads would add CPU time by spinning while they wait for each other. The servers take
turns. The CPU time of a server covers all of its processes, including idle ones and those of Ray
and HAProxy. The client runs on the same cores.
"""

import base64
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
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
_PEERS = {"fastapi": "FastAPI + uvicorn", "litserve": "LitServe", "bentoml": "BentoML"}
_BENTOML_PYTHON = Path(__file__).parents[1] / ".venv-bentoml/bin/python"
_PERCENTILES = (50, 99)

_FIVE_MB = {
    "model_type": "resnet",
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128, 256],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}


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
    _Case("5 MB ResNet", _FIVE_MB, 64, (100, 200, 512), 60),
    _Case("ResNet-18", SMALL, SMALL_SIDE, (8, 32, 64), 90),
)


def peers() -> Iterator[Row]:
    """Compare kway's CPU time, requests/s and latencies with those of each peer."""
    if not _BENTOML_PYTHON.exists():
        print("BentoML is not compared. Run make bench-serving, which installs it", file=sys.stderr)
    for case in _CASES:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            bundle = Path(name) / "bundle"
            write_random(bundle, case.network, _CLASSES, size=case.side)
            servers = {"kway": stack.enter_context(kway(bundle, "--threads", "1"))}
            for kind in _PEERS:
                if kind != "bentoml":
                    started = module("benchmarks.serving_peers", kind, bundle)
                elif _BENTOML_PYTHON.exists():
                    name = "benchmarks.serving_bentoml"
                    started = module(name, kind, bundle, python=_BENTOML_PYTHON)
                else:
                    continue
                servers[kind] = stack.enter_context(started)
            bodies = {kind: _body(kind, case.side) for kind in servers}
            _check_same_work(servers, bodies)
            for clients, count in zip(_CLIENTS, case.requests, strict=True):
                yield from _compare(case, servers, bodies, clients, count)


def _compare(
    case: _Case, servers: dict[str, Server], bodies: dict[str, bytes], clients: int, count: int
) -> Iterator[Row]:
    turns = {
        name: _Turns(server, _request(bodies[name]), count, clients)
        for name, server in servers.items()
    }
    walls = take_turns(turns, title=f"{case.what}, {clients}", seconds=case.seconds)
    for kind in list(servers)[1:]:
        peer, label = _PEERS[kind], f"{case.what}, {clients} clients"
        ours, theirs = turns["kway"], turns[kind]
        yield ratio_row(
            f"CPU time per request, kway / {peer}",
            label,
            np.array(ours.cpu_seconds[1:]) / count,
            np.array(theirs.cpu_seconds[1:]) / count,
        )
        yield rate_row(
            f"requests/s, kway / {peer}",
            label,
            walls["kway"],
            walls[kind],
            at_least=None,
            count=count,
            unit="requests/s",
        )
        for percent in _PERCENTILES:
            yield ratio_row(
                f"latency p{percent}, kway / {peer}",
                label,
                ours.latency(percent),
                theirs.latency(percent),
            )


class _Turns:
    """Sends requests to a server, and records the CPU seconds of its processes and the latencies of
    each turn."""

    def __init__(self, server: Server, request: bytes, count: int, clients: int) -> None:
        self._server, self._request = server, request
        self._count, self._clients = count, clients
        self.cpu_seconds: list[float] = []
        self._latencies: list[list[float]] = []

    def __call__(self) -> None:
        taken: list[float] = []
        send = load(self._server.port, self._request, self._count, self._clients, latencies=taken)
        before = _cpu_seconds(self._server.pid)
        send()
        after = _cpu_seconds(self._server.pid)
        self.cpu_seconds.append(sum(after[one] - before.get(one, 0.0) for one in after))
        self._latencies.append(taken)

    def latency(self, percent: float) -> np.ndarray:
        """Return a percentile of the latencies in seconds for each turn but the first, the
        warm-up."""
        return np.array([np.percentile(taken, percent) for taken in self._latencies[1:]])


def _cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process and its descendants by process ID."""
    found = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _body(kind: str, side: int) -> bytes:
    image = base64.b64encode(random_jpeg(side)).decode()
    query = {"classes": [name_of(1)], "images": [image], "recall": 0.9}
    return json.dumps([query] if kind == "bentoml" else query).encode()


def _request(body: bytes) -> bytes:
    head = "POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _check_same_work(servers: dict[str, Server], bodies: dict[str, bytes]) -> None:
    """Check that all servers return the same score.

    Also waits for LitServe, which starts listening before its model is loaded.
    """
    scores = [_score(server.port, bodies[kind]) for kind, server in servers.items()]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4, atol=1e-4)


def _score(port: int, body: bytes) -> float:
    url, headers = f"http://127.0.0.1:{port}/v1/query", {"Content-Type": "application/json"}
    for _ in range(100):
        response = httpx.post(url, content=body, headers=headers, timeout=60)
        if response.status_code != 503:
            break
        time.sleep(0.2)
    response.raise_for_status()
    answers = response.json()
    answer = answers[0] if isinstance(answers, list) else answers
    score: float = answer["results"][0]["verdicts"][0]["score"]
    return score
