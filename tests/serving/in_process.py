"""The HTTP application in this process, with the real routes, service and model but without Ray.

Internal errors (500) are raised as exceptions, so no test can miss them.
"""

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import cv2
import grpc
import httpx
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI

from serving.app import build_app
from serving.config import ServingConfig
from serving.metrics import Metric, Metrics
from serving.tokens import Clients
from serving.versions import ServedModel
from tests.waiting import wait_until


@dataclass
class Call:
    """The context of a gRPC call, as a servicer method sees it."""

    metadata: dict[str, str]
    code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return list(self.metadata.items())

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class Recorder:
    """An exporter that keeps what is recorded, in order."""

    def __init__(self) -> None:
        self.values: list[tuple[Metric, float, dict[str, str]]] = []

    def record(self, metric: Metric, value: float, **labels: str) -> None:
        self.values.append((metric, value, labels))

    def labels_of(self, metric: Metric) -> list[dict[str, str]]:
        return [labels for found, _, labels in self.values if found == metric]


def application(bundle: Path, recorder: Recorder | None = None, **limits: object) -> FastAPI:
    config = ServingConfig.model_validate({"threads": torch.get_num_threads(), **limits})
    clients = Clients(config.token_file)
    model = ServedModel(bundle, config, Metrics(recorder or Recorder()))
    return build_app(model, clients, lambda: b"kway_up 1\n")


@contextmanager
def listening(api: FastAPI, **options: Any) -> Iterator[str]:
    """Serve the application on a free port and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_level="error", **options))
    thread = Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, possible=thread.is_alive)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def occupied(url: str, **headers: str) -> Iterator[None]:
    """Send a query to an application with a long `batch_wait_seconds`, and disconnect at the end.
    Once the query has arrived, it occupies a slot until then.
    """
    pixels = np.zeros((4, 4, 3), np.uint8)
    image = base64.b64encode(cv2.imencode(".png", pixels)[1].tobytes()).decode()
    body = json.dumps({"classes": [0], "images": [image]}).encode()
    fields = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, **headers}.items())
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(f"POST /v1/query HTTP/1.1\r\n{head}\r\n".encode() + body)
        yield


def write_tokens(path: Path, *tokens: str) -> None:
    """Write a token file that only this user can read."""
    path.touch(mode=0o600)
    path.write_text("\n".join(tokens) + "\n")


def ask(api: FastAPI, method: str, url: str, **options: object) -> httpx.Response:
    """Send one request and return the response."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, url, **options)  # type: ignore[arg-type]

    return asyncio.run(send())


def post(api: FastAPI, url: str, body: bytes, kind: str) -> httpx.Response:
    return ask(api, "POST", url, content=body, headers={"content-type": kind})


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and error code of a response. Fails if it does not have the documented
    format.
    """
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    assert body["error"]["message"]
    return answer.status_code, body["error"]["code"]
