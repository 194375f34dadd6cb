"""The Python client: which errors it retries, how it splits queries, and how it validates
arguments.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
import pytest

from serving.client import Client, RejectedError
from tests.quiet_server import QuietServer

_MODEL: dict[str, Any] = {
    "reads": "texts",
    "recalls": [0.9],
    "limits": {
        "max_inputs": 2,
        "max_classes": 9,
        "max_text_chars": 10,
        "max_body_bytes": 4000,
        "max_pixels": 9,
    },
}
_VERDICT = {"class": "a", "class_id": 0, "threshold": None, "threshold_source": None, "match": None}
Response = tuple[int, dict[str, str], bytes]


def verdicts_of(body: bytes) -> Response:
    texts = json.loads(body)["texts"]
    results = [
        {"input": index, "verdicts": [{**_VERDICT, "score": float(len(text))}]}
        for index, text in enumerate(texts)
    ]
    return 200, {}, json.dumps({"aligned": True, "notice": None, "results": results}).encode()


def error_response(status: int, code: str, **headers: str) -> Response:
    return status, headers, json.dumps({"error": {"code": code, "message": "no"}}).encode()


@contextmanager
def serving(
    first_responses: list[Response | None], limits: dict[str, int] | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """Start a server that sends `first_responses` before any real response. None closes the
    connection instead.
    """
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            model = {**_MODEL, "limits": {**_MODEL["limits"], **(limits or {})}}
            self._send((200, {}, json.dumps(model).encode()))

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            response = first_responses.pop(0) if first_responses else verdicts_of(bodies[-1])
            if response is not None:
                self._send(response)

        def _send(self, response: Response) -> None:
            status, headers, body = response
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def test_requests_are_retried_if_the_server_is_busy_or_a_replica_died() -> None:
    first = [
        error_response(429, "too_busy", Retry_After="0"),
        error_response(503, "timeout"),
        (500, {}, b"Internal Server Error"),  # a proxy's response if a replica died
        (408, {}, b"Request timed out"),  # and if none was available
        None,
    ]
    with serving(first) as (url, bodies), Client(url) as client:
        answer = client.query(["a"], ["one"])
    assert [result.verdicts[0].score for result in answer.results] == [3.0]
    assert len(bodies) == 6


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "internal"), (401, "no_token"), (404, "unknown_class"), (422, "invalid_query")],
)
def test_errors_from_the_server_are_not_retried(status: int, code: str) -> None:
    with (
        serving([error_response(status, code)]) as (url, bodies),
        Client(url) as client,
        pytest.raises(RejectedError) as rejected,
    ):
        client.query(["a"], ["one"])
    assert (rejected.value.status, rejected.value.code) == (status, code)
    assert len(bodies) == 1


def test_retries_stop_after_retry_seconds() -> None:
    busy = error_response(429, "too_busy", Retry_After="1")
    with (
        serving([busy] * 100) as (url, bodies),
        Client(url, retry_seconds=0.5) as client,
        pytest.raises(OSError, match=r"was busy for \d+\.\d s: no$"),
    ):
        client.query(["a"], ["one"])
    assert len(bodies) == 1


def test_unreachable_and_invalid_urls_fail_immediately() -> None:
    with serving([]) as (url, _):
        pass
    with Client(url) as client, pytest.raises(OSError, match="is `kway serve` running there"):
        client.served()
    with pytest.raises(ValueError, match="is not a URL"):
        Client("http://a:b")
    for bad in ("ftp://a", "http://", ""):
        with Client(bad) as client, pytest.raises(OSError, match="no response from"):
            client.served()


@pytest.mark.parametrize(
    ("limits", "texts", "sizes"),
    [
        ({}, ["x" * length for length in (1, 2, 3, 4, 5)], [2, 2, 1]),
        # "猫" takes six bytes in JSON, so this text exceeds the limit. The client sends it in a
        # request of its own, and the server decides whether to accept it.
        (
            {"max_inputs": 100, "max_body_bytes": 5000},
            [one * 1400 for one in "abc猫e"],
            [2, 1, 1, 1],
        ),
    ],
)
def test_a_query_is_split_by_the_servers_limits(
    limits: dict[str, int], texts: list[str], sizes: list[int]
) -> None:
    with serving([], limits=limits) as (url, bodies), Client(url) as client:
        answer = client.query(["a", np.int64(7)], (text for text in texts))
    assert [len(json.loads(body)["texts"]) for body in bodies] == sizes
    assert [result.verdicts[0].score for result in answer.results] == [len(one) for one in texts]
    assert [result.input for result in answer.results] == [0, 1, 2, 3, 4]
    assert json.loads(bodies[0])["classes"] == ["a", 7]


@pytest.mark.parametrize("field", ["texts", "images"])
def test_an_error_gives_the_index_of_the_input_in_the_whole_query(field: str) -> None:
    body = {"error": {"code": "bad", "message": f"{field}[1]: of texts[0] or images[0]"}}
    bad_response = (422, {}, json.dumps(body).encode())
    ok = verdicts_of(b'{"texts": ["a", "b"]}')
    with (
        serving([ok, ok, bad_response]) as (url, _),
        Client(url) as client,
        pytest.raises(RejectedError) as rejected,
    ):
        client.query(["a"], ["one"] * 6)
    assert rejected.value.reason == f"{field}[5]: of texts[0] or images[0]"
    assert (rejected.value.status, rejected.value.code) == (422, "bad")


@pytest.mark.parametrize(
    ("classes", "inputs", "error", "message"),
    [
        ("husky", ["one"], TypeError, "classes is a single str: pass a list"),
        ([1.0], ["one"], TypeError, "must be a name or an id, got 1.0"),
        ([True], ["one"], TypeError, "got True"),
        (["a"], "one", TypeError, "inputs is a single str: pass a list"),
        (["a"], [None], TypeError, "got NoneType"),
        (["a"], [], ValueError, "there are no inputs"),
        (["a"], [b"image"], ValueError, "reads texts: pass texts"),
    ],
)
def test_invalid_classes_and_inputs_raise_before_anything_is_sent(
    classes: Any, inputs: Any, error: type[Exception], message: str
) -> None:
    with serving([]) as (url, bodies), Client(url) as client, pytest.raises(error, match=message):
        client.query(classes, inputs)
    assert bodies == []


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Start a server and yield its URL and the requests it receives. The server sends `answers` in
    order, then repeats the last one.

    After each response, the server shuts down its side of the connection and reads until the client
    disconnects.
    """
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    heads.append(connection.recv(65536))
                    connection.sendall(answers[min(len(heads), len(answers)) - 1])
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        listener.close()


def test_a_token_is_stripped_and_never_appears_in_an_error() -> None:
    with answering(b"") as (url, heads):
        with (
            Client(url, token=" secret\n", retry_seconds=0) as client,
            pytest.raises(OSError, match="no"),
        ):
            client.served()
        for bad in (
            "secret\nsecret",
            "secr\u00e9t",
            "\u65e5\u672c",
            "secret secret",
            " ",
            "secret\0",
        ):
            with pytest.raises(ValueError, match="token must be a single word") as found:
                Client(url, token=bad)
            assert "secr" not in str(found.value)
    assert b"Authorization: Bearer secret\r\n" in heads[0]


# ---------------------------------------------------------------------------- invalid responses


def http_response(body: bytes, status: str = "200 OK", head: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"HTTP/1.1 " + status.encode() + b"\r\n" + head + length + body


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http_response(b"hello", head=b"Content-Encoding: gzip\r\n"), OSError),
        (http_response(b"[" * 200_000, "400 Bad Request"), RejectedError),
        (http_response(b"9" * 10_000, "400 Bad Request"), RejectedError),
        (http_response(b'{"error":"no"}', "400 Bad Request"), RejectedError),
        (http_response(b"null", "400 Bad Request"), RejectedError),
        (http_response(b"<html>hi</html>"), RejectedError),
        (http_response(b"", "429 Busy", b"Retry-After: " + b"9" * 5000 + b"\r\n"), OSError),
        (b"garbage\r\n\r\n", OSError),
        (http_response(b"", "307 Elsewhere", b"Location: http://127.0.0.1:1/\r\n"), RejectedError),
    ],
)
def test_any_invalid_response_raises_oserror_or_rejected_error(
    answer: bytes, error: type[Exception]
) -> None:
    with (
        answering(answer) as (url, _),
        Client(url, retry_seconds=0) as client,
        pytest.raises(error),
    ):
        client.served()


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_names_that_would_change_the_path_are_rejected(name: str) -> None:
    with (
        answering(http_response(b"{}")) as (url, heads),
        Client(url) as client,
        pytest.raises(ValueError, match="is not a valid name or id for /v1/"),
    ):
        client.search_page(name, ["a"])
    assert heads == []
