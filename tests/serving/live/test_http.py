"""The HTTP application on each runner: the same answers, and limits on connections and bodies."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import in_process
from tests.serving.live.servers import MAX_BODY, MAX_INPUTS, MAX_REQUESTS, TOKEN
from tests.serving.started import Server, as_json, scores_of

HEAD = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Authorization: Bearer %s\r\n" % TOKEN.encode()

# ---------------------------------------------------------------------------- answers


def requests(images: list[Path]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the method, path and options of valid and invalid requests."""
    two, file = as_json(images[:2]), images[0].read_bytes()
    form = {"data": {"classes": ["husky"]}, "files": [("images", file), ("images", file)]}
    yield "POST", "/v1/query", {"json": {**two, "classes": ["samoyed", "7"], "recall": 0.9}}
    yield "POST", "/v1/query", {"json": {**two, "classes": ["samoyed"], "threshold": 0.5}}
    yield "POST", "/v1/query", form
    yield (
        "POST",
        "/v1/query?classes=husky",
        {"content": file, "headers": {"content-type": "image/png"}},
    )
    yield "POST", "/v1/classify", {"json": {**two, "top": 3}}
    ids = {"name": "class_ids", "datatype": "INT64", "shape": [2], "data": [2, 6]}
    encoded = {"name": "images", "datatype": "BYTES", "shape": [2], "data": two["images"]}
    yield "POST", "/v2/models/pets/infer", {"json": {"inputs": [ids, encoded]}}
    for path in ("health", "v1/model", "v1/classes?search=CAT", "v2", "v2/models/pets"):
        yield "GET", f"/{path}", {}
    yield "GET", "/openapi.json", {}
    # Invalid requests
    yield "POST", "/v1/query", {"json": {**two, "classes": ["husky", "hsky"]}}
    yield "POST", "/v1/query", {"json": {**two, "classes": ["husky"], "recal": 0.9}}
    yield "POST", "/v1/query", {"content": b"{", "headers": {"content-type": "application/json"}}
    yield "POST", "/v1/query", {"content": b" " * (MAX_BODY + 1)}
    yield "POST", "/v1/query", {"content": b"classes=husky", "headers": {"content-type": "a/b"}}
    yield "POST", "/v1/query", {}
    yield "GET", "/v1/model", {"headers": {"authorization": "Bearer wrong"}}
    for path in ("nowhere", "v1/query"):
        yield "GET", f"/{path}", {}


def test_each_runner_gives_the_same_json_for_the_same_request(
    server: Server, bundle: Path, tokens: Path, images: list[Path]
) -> None:
    limits = {"max_inputs": MAX_INPUTS, "max_body_bytes": MAX_BODY, "max_requests": MAX_REQUESTS}
    application, statuses = in_process.application(bundle, token_file=tokens, **limits), set()
    token = {"authorization": f"Bearer {TOKEN}"}
    for method, path, options in requests(images):
        options["headers"] = {**token, **options.get("headers", {})}
        here = in_process.ask(application, method, path, **options)
        there = httpx.request(method, f"{server.url}{path}", timeout=60, **options)
        assert (there.status_code, there.json()) == (here.status_code, here.json()), path
        for name in ("content-type", "retry-after", "www-authenticate", "kway-model-version"):
            assert there.headers.get(name) == here.headers.get(name), (path, name)
        statuses.add(there.status_code)
    assert statuses == {200, 400, 401, 404, 405, 413, 415, 422}


def test_the_printed_curl_command_works(server: Server, images: list[Path], tmp_path: Path) -> None:
    (tmp_path / "your-image.png").write_bytes(images[0].read_bytes())
    ran = subprocess.run(
        ["sh", "-c", server.curl],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TOKEN": TOKEN},
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["results"][0]["verdicts"][0]["class"] == "husky"


# ---------------------------------------------------------------------------- load


def test_excess_requests_get_429_and_the_others_get_correct_answers(
    client: httpx.Client, images: list[Path]
) -> None:
    body = as_json(images[:MAX_INPUTS], classes=["husky", "samoyed"])
    expected = client.post("/v1/query", json=body).json()

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=client.base_url,
            headers=client.headers,
            timeout=60,
            limits=httpx.Limits(max_connections=None),
        ) as many:
            return await asyncio.gather(*(many.post("/v1/query", json=body) for _ in range(100)))

    answers = asyncio.run(send_all())
    rejected = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(rejected) < len(answers)
    for answer in rejected:
        assert in_process.refusal(answer) == (429, "too_many_requests")
        assert int(answer.headers["retry-after"]) >= 1
    scores = scores_of(expected)
    for answer in answers:
        if answer.status_code == 200:
            assert scores_of(answer.json()) == pytest.approx(scores, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------------------- connections


def test_half_open_requests_do_not_block_others_and_slow_bodies_get_408(
    server: Server, client: httpx.Client, images: list[Path]
) -> None:
    slow = HEAD + b"Content-Length: 200000\r\n\r\n{"
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as opened:
        connections = []
        for start in [b"", HEAD, slow] * 50:
            connection = socket.create_connection((host, int(port)), timeout=60)
            connections.append(opened.enter_context(connection))
            connection.sendall(start)
        body = as_json(images[:1], classes=["husky"])
        for _ in range(3):
            assert client.post("/v1/query", json=body).status_code == 200
        for connection in connections[2::3]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
