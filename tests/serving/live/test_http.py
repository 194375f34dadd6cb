"""The HTTP application on each runner: the same answers, and limits on connections and bodies."""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.serving import in_process
from tests.serving.live import servers
from tests.serving.live.servers import (
    CLIENT_REQUESTS,
    MAX_BODY,
    MAX_INPUTS,
    NEVER_QUERIED,
    TOKEN,
)
from tests.serving.started import Server, SharedServer, as_json, ask, error_of, scores_of
from tests.tiny_bundle import NAMES

HEAD = b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Authorization: Bearer %s\r\n" % TOKEN.encode()

# ---------------------------------------------------------------------------- answers


@pytest.fixture(scope="module")
def application(bundle: Path, tokens: Path) -> FastAPI:
    """The application of the guarded server, in this process."""
    return in_process.application(
        bundle,
        token_file=tokens,
        max_inputs=MAX_INPUTS,
        max_body_bytes=MAX_BODY,
        max_requests=servers.MAX_REQUESTS,
    )


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
    yield "POST", "/v1/query", {"json": {"classes": ["husky"], "images": ["AAAA"]}}
    yield "POST", "/v1/query", {"json": as_json(images[:5], classes=["husky"])}
    yield "POST", "/v1/query", {"content": b"{", "headers": {"content-type": "application/json"}}
    yield "POST", "/v1/query", {"content": b" " * (MAX_BODY + 1)}
    yield "POST", "/v1/query", {"content": b"classes=husky", "headers": {"content-type": "a/b"}}
    yield "POST", "/v1/query", {}
    yield "GET", "/v1/model", {"headers": {"authorization": "Bearer wrong"}}
    for path in ("nowhere", "v1/query", "v1/classes?limit=x", "v2/models/cars"):
        yield "GET", f"/{path}", {}


def test_each_runner_gives_the_same_json_for_the_same_request(
    server: Server, application: FastAPI, images: list[Path]
) -> None:
    statuses = set()
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


def test_the_command_gets_the_same_answer_from_the_server_as_from_the_bundle(
    server: Server, bundle: Path, tokens: Path, images: list[Path]
) -> None:
    """There are more images than one request may have."""
    names = ("--class", "samoyed", "--class", "7", "--recall", 0.9, "--json", *images)
    there = json.loads(ask(server.url, "--token-file", tokens, *names))
    here = json.loads(ask(bundle, *names))
    assert len({round(score, 3) for score in scores_of(here)}) == 2 * len(images)
    assert scores_of(there) == pytest.approx(scores_of(here), rel=1e-5, abs=1e-6)
    for result in (*here["results"], *there["results"]):
        for verdict in result["verdicts"]:
            del verdict["score"]
    assert there == here


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


def test_concurrent_requests_for_different_classes_each_get_their_own_answer(
    client: httpx.Client, images: list[Path]
) -> None:
    classes = [one for one in range(len(NAMES)) if one != NEVER_QUERIED]
    alone: dict[tuple[int, int], float] = {}
    for first in (0, MAX_INPUTS):
        some = images[first : first + MAX_INPUTS]
        scores = scores_of(client.post("/v1/query", json=as_json(some, classes=classes)).json())
        pairs = product(range(first, first + len(some)), classes)
        alone |= dict(zip(pairs, scores, strict=True))
    assert len({round(score, 3) for score in alone.values()}) > len(NAMES)

    def score_of(pair: tuple[int, int]) -> float:
        image, class_id = pair
        answer = client.post("/v1/query", json=as_json([images[image]], classes=[class_id]))
        assert answer.status_code == 200, answer.text
        (verdict,) = answer.json()["results"][0]["verdicts"]
        assert verdict["class"] == NAMES[class_id]
        return verdict["score"]

    with ThreadPoolExecutor(CLIENT_REQUESTS) as threads:
        together = list(threads.map(score_of, alone))
    assert together == pytest.approx(list(alone.values()), rel=1e-4, abs=1e-5)


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
        assert error_of(answer)[:2] == (429, "too_many_requests")
        assert int(answer.headers["retry-after"]) >= 1
    scores = scores_of(expected)
    for answer in answers:
        if answer.status_code == 200:
            assert scores_of(answer.json()) == pytest.approx(scores, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------------------- connections


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@contextmanager
def all_open(server: Server, starts: list[bytes]) -> Iterator[list[socket.socket]]:
    """Open a connection for each element of `starts`, and send the element over it."""
    with ExitStack() as opened:
        connections = [opened.enter_context(connected(server)) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.sendall(start)
        yield connections


def response_to(server: Server, request: bytes) -> bytes:
    """Return everything that the server sends until it closes the connection."""
    with connected(server) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_a_large_body_is_rejected_by_its_content_length_before_it_is_sent(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 268435456\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_content_length_is_rejected_once_it_is_too_long(server: Server) -> None:
    part = b" " * 65536
    with connected(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY // len(part) + 1):  # the body never ends
            connection.sendall(b"10000\r\n" + part + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_half_open_requests_do_not_block_others_and_slow_bodies_get_408(
    server: Server, client: httpx.Client, images: list[Path]
) -> None:
    slow = HEAD + b"Content-Length: 200000\r\n\r\n{"
    with all_open(server, [b"", HEAD, slow] * 50) as connections:
        body = as_json(images[:1], classes=["husky"])
        for _ in range(3):
            assert client.post("/v1/query", json=body).status_code == 200
        for connection in connections[2::3]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"not a request\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Content-Length: +1\r\n\r\na",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"X-Bad: a\x00b\r\n\r\n",
        HEAD + b"X Bad: a\r\n\r\n",
    ],
)
def test_malformed_http_is_rejected(server: Server, request_: bytes) -> None:
    assert response_to(server, request_).startswith(b"HTTP/1.1 400 ")


def test_a_request_cannot_be_smuggled_in_a_body(server: Server) -> None:
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in (
        b"Content-Length: %d\r\n" % (5 + len(smuggled)) + b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
    ):
        with connected(server) as connection:
            connection.sendall(HEAD + head + b"\r\n0\r\n\r\n" + smuggled)
            connection.shutdown(socket.SHUT_WR)
            answers = connection.makefile("rb").read()
        assert b"HTTP/1.1 200 " not in answers, head


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:80", 200),
        ("evil.example", 400),
        ("localhost.evil.example:80", 400),
        ("127.0.0.1.evil.example", 400),
        ("127.0.0.2", 400),
        ("evil.example,localhost", 400),
        ("", 400),
    ],
)
def test_a_loopback_server_without_tokens_answers_only_to_loopback_names(
    open_server: SharedServer, host: str, status: int
) -> None:
    url = open_server.get().url
    for path in ("/health", "/v1/model", "/"):
        assert httpx.get(f"{url}{path}", headers={"host": host}).status_code == status
