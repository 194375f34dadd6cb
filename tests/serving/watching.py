"""Fixtures and helpers for the watch tests: a server in this process, and two clients."""

import base64
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.client import HTTPResponse
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest
import torch
from websockets.sync.client import ClientConnection, connect

from serving.config import ServingConfig
from serving.http.app import build_api
from serving.model import Model
from serving.models.models import Models
from serving.service import Service, Shared
from serving.tokens import Clients
from serving.watches.board import Board
from tests.serving import in_process
from tests.tiny_bundle import write

ALICE, BOB = "a" * 32, "b" * 32
NDJSON = {"content-type": "application/x-ndjson"}


def socket_to(url: str, path: str, **headers: str) -> ClientConnection:
    """Open a WebSocket."""
    return connect(url.replace("http", "ws") + path, additional_headers=headers, open_timeout=20)


class OpenFeed:
    """A feed over HTTP whose request body is still open, so that frames and lines can alternate."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket, self.response = opened, HTTPResponse(opened)

    def send(self, lines: bytes) -> None:
        self._socket.sendall(f"{len(lines):x}\r\n".encode() + lines + b"\r\n")

    def finish(self) -> None:
        """End the request body."""
        self._socket.sendall(b"0\r\n\r\n")

    def line(self) -> dict | None:
        """Return the next line of the response, or None at the end of the response."""
        raw = self.response.readline()
        return json.loads(raw) if raw else None


@contextmanager
def feeding(url: str, path: str, token: str = ALICE) -> Iterator[OpenFeed]:
    """Open a feed and read the response headers before sending any frame."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as opened:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        kind = "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        opened.sendall((head + kind).encode())
        feed = OpenFeed(opened)
        feed.response.begin()
        yield feed


class Counters:
    """The counters that the service and the feeds update."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.hits = 0

    def count(self, *, outcome: str, inputs: int, seconds: float | None) -> None: ...

    def count_frame(self, outcome: str) -> None:
        self.frames.append(outcome)

    def count_hits(self, count: int) -> None:
        self.hits += count

    def count_lost_hits(self, count: int) -> None: ...

    def set_watches(self, count: int) -> None: ...


class _ModelCounters:
    """Counts a model's forward passes and its matrix products with the class weights. While `gate`
    is cleared, forward passes block.
    """

    def __init__(self, model: Model) -> None:
        self.started = self.forwards = self.products = 0
        self.gate = threading.Event()
        self.gate.set()
        features, scores = model.features, model.bundle.scores

        def counted_features(prepared):
            self.started += 1
            self.gate.wait(20)
            self.forwards += 1
            return features(prepared)

        def counted_scores(*arguments):
            self.products += 1
            return scores(*arguments)

        model.features, model.bundle.scores = counted_features, counted_scores


class Kway:
    """A server in this process, with counters."""

    def __init__(self, bundle: Path, tokens: Path | None, **limits: object) -> None:
        config = ServingConfig.model_validate(
            {"threads": torch.get_num_threads(), "token_file": tokens, **limits}
        )
        model = Model.open(bundle)
        self.model, self.counts = _ModelCounters(model), Counters()
        self.board = Board(config)
        self.api = build_api(
            Models.of(Service(model, Shared(config, self.counts)), self.board.galleries),
            Clients.of_file(tokens, config.client_address_header),
            in_process.no_metrics,
            self.board,
            self.counts,
        )
        self.feeds = self.api.state.resources.of().feeds
        self.api.router.lifespan_context = self._lifespan
        self.url = ""

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        yield
        await self.board.close()

    def client(self, token: str = ALICE) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20)

    def socket(self, path: str, token: str = ALICE, **headers: str) -> ClientConnection:
        return socket_to(self.url, path, authorization=f"Bearer {token}", **headers)


@contextmanager
def running(folder: Path, *, has_tokens: bool = True, **limits: object) -> Iterator[Kway]:
    """Start a server with a small model and, by default, with tokens for Alice and Bob."""
    tokens = None
    if has_tokens:
        tokens = folder / "tokens"
        tokens.touch(0o600)
        tokens.write_text(f"{ALICE}\n{BOB}\n")
    kway = Kway(write(folder / "pets"), tokens, **limits)
    with in_process.listening(kway.api, ws="websockets-sansio") as url:
        kway.url = url
        yield kway


@pytest.fixture
def alice(kway: Kway) -> Iterator[httpx.Client]:
    """Alice's client. Her watches and Bob's are deleted after the test."""
    with kway.client() as client, kway.client(BOB) as bob:
        yield client
        for one in (client, bob):
            for watch in one.get("/v1/watches").json()["watches"]:
                one.delete(f"/v1/watches/{watch['id']}")


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    random = np.random.default_rng(0)
    pixels = [random.integers(0, 256, (20, 31), dtype=np.uint8) // (i + 1) for i in range(6)]
    return [cv2.imencode(".png", image)[1].tobytes() for image in pixels]


def encoded(image: bytes) -> str:
    return base64.b64encode(image).decode()


def frames(images: list[bytes], **fields: object) -> bytes:
    lines = [json.dumps({"image": encoded(image), **fields}) for image in images]
    return ("\n".join(lines) + "\n").encode()


def create_watch(client: httpx.Client, **fields: object) -> dict:
    body = {"classes": ["husky"], "threshold": -1e6, "ttl_seconds": 60, **fields}
    response = client.post("/v1/watches", json=body)
    assert response.status_code == 201, response.text
    return response.json()


def send_frames(
    client: httpx.Client, content: bytes, feed: str = "door", **params: object
) -> list[dict]:
    response = client.post(f"/v1/feeds/{feed}", content=content, headers=NDJSON, params=params)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def eventually(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def listening(client: httpx.Client, watch_id: str, **params: object) -> Iterator[Iterator[dict]]:
    with client.stream("GET", f"/v1/watches/{watch_id}/hits", params=params) as response:  # type: ignore[arg-type]
        assert response.status_code == 200
        lines = (json.loads(line) for line in response.iter_lines())
        assert next(lines)["listening"] == watch_id
        yield lines
