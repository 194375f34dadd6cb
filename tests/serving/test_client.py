"""The Python client: what it asks again, what it takes as final, and how it splits a question."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from launch.commands import query
from serving.client import Client, RefusedError
from serving.client.messages import Served
from serving.client.ndjson import STREAM_EVENTS
from serving.client.transport import Transport
from tests.serving.canned import answering

_MODEL = {
    "reads": "texts",
    "recalls": [0.9],
    "limits": {"max_inputs": 2, "max_text_chars": 10, "max_body_bytes": 4000},
}
_VERDICT = {"class": "a", "class_id": 0, "threshold": None, "threshold_source": None, "match": None}
Answer = tuple[int, dict[str, str], bytes]


def verdicts_of(body: bytes) -> Answer:
    texts = json.loads(body)["texts"]
    results = [
        {"input": place, "verdicts": [{**_VERDICT, "score": float(len(text))}]}
        for place, text in enumerate(texts)
    ]
    return 200, {}, json.dumps({"aligned": True, "notice": None, "results": results}).encode()


def refusal(status: int, code: str, **headers: str) -> Answer:
    return status, headers, json.dumps({"error": {"code": code, "message": "no"}}).encode()


@contextmanager
def serving(
    first: list[Answer | None],
    gets: list[str] | None = None,
    limits: dict[str, int] | None = None,
    port: int = 0,
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers before it answers in earnest; None: it hangs up."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if gets is not None:
                gets.append(self.path)
            said = _MODEL if limits is None else {**_MODEL, "limits": limits}
            self._say((200, {}, json.dumps(said).encode()))

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            answer = first.pop(0) if first else verdicts_of(bodies[-1])
            if answer is not None:
                self._say(answer)

        def _say(self, answer: Answer) -> None:
            status, headers, body = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_busy_servers_and_replicas_that_died_are_asked_again_and_answer_once() -> None:
    first = [
        refusal(429, "too_busy", Retry_After="0"),
        refusal(503, "timeout"),
        (500, {}, b"Internal Server Error"),  # a proxy's words about a replica that died
        None,
    ]
    with serving(first) as (url, bodies), Client(url) as client:
        found = client.query(["a"], ["one"])
    assert [result.verdicts[0].score for result in found.results] == [3.0]
    assert len(bodies) == 5


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "internal"), (401, "no_token"), (404, "unknown_class"), (422, "invalid_query")],
)
def test_what_the_server_means_is_final(status: int, code: str) -> None:
    with (
        serving([refusal(status, code)]) as (url, bodies),
        Client(url) as client,
        pytest.raises(RefusedError) as refused,
    ):
        client.query(["a"], ["one"])
    assert (refused.value.status, refused.value.code) == (status, code)
    assert len(bodies) == 1


def test_patience_has_an_end() -> None:
    busy = refusal(429, "too_busy", Retry_After="1")
    with (
        serving([busy] * 100) as (url, bodies),
        Client(url, patience=0.5) as client,
        pytest.raises(OSError, match=r"was busy for \d+\.\d s: no$"),
    ):
        client.query(["a"], ["one"])
    assert len(bodies) == 1


def test_nobody_there_is_said_at_once() -> None:
    with serving([]) as (url, _):
        pass
    with Client(url) as client, pytest.raises(OSError, match="is `kway serve` running there"):
        client.served()
    with pytest.raises(ValueError, match="is no URL"):
        Client("http://a:b")
    for bad in ("ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="is no URL of a server"):
            Client(bad)
    for bad in (f"http://{'a' * 70}.com", "http://a..b"):
        with pytest.raises(ValueError, match="label"):
            Client(bad)


def test_a_question_is_split_by_the_servers_limits_and_joined_in_order() -> None:
    texts = ["x" * length for length in (1, 2, 3, 4, 5)]
    with serving([]) as (url, bodies), Client(url) as client:
        found = client.query(["a", 7], texts)
    assert [result.verdicts[0].score for result in found.results] == [1, 2, 3, 4, 5]
    assert [result.input for result in found.results] == [0, 1, 2, 3, 4]
    assert [len(json.loads(body)["texts"]) for body in bodies] == [2, 2, 1]
    assert json.loads(bodies[0])["classes"] == ["a", 7]


def test_a_question_is_split_by_bytes_too() -> None:
    limits = {"max_inputs": 100, "max_text_chars": 5000, "max_body_bytes": 5000}
    with serving([], limits=limits) as (url, bodies), Client(url) as client:
        found = client.query(["a"], (letter * 1400 for letter in "abc猫e"))
    # The cat is six bytes a letter in JSON; alone it is sent all the same, and the server decides.
    assert [len(json.loads(body)["texts"]) for body in bodies] == [2, 1, 1, 1]
    assert [result.input for result in found.results] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("field", ["texts", "images"])
def test_a_refusal_names_the_place_in_all_inputs(field: str) -> None:
    said = {"error": {"code": "bad", "message": f"{field}[1]: of texts[0] or images[0]"}}
    refused = (422, {}, json.dumps(said).encode())
    ok = verdicts_of(b'{"texts": ["a", "b"]}')
    with (
        serving([ok, ok, refused]) as (url, _),
        Client(url) as client,
        pytest.raises(RefusedError) as found,
    ):
        client.query(["a"], ["one"] * 6)
    assert found.value.reason == f"{field}[5]: of texts[0] or images[0]"
    assert (found.value.status, found.value.code) == (422, "bad")


def test_a_server_that_restarts_is_waited_for() -> None:
    with serving([]) as (url, _):
        client = Client(url, patience=20)
        client.served()
    again = threading.Event()

    def restart() -> None:
        time.sleep(0.5)
        with serving([], port=int(url.rsplit(":", 1)[1])):
            assert again.wait(20)

    thread = threading.Thread(target=restart)
    thread.start()
    with client:
        assert client.served().reads == "texts"
        again.set()
    thread.join()
    with Client(url, patience=20) as late, pytest.raises(OSError, match="no answer from"):
        late.served()  # which has never seen it


@pytest.mark.parametrize(
    ("classes", "inputs", "words"),
    [
        ("husky", ["one"], "classes is one str: give a list"),
        ([1.0], ["one"], "a class is a name or a number, and not 1.0"),
        ([True], ["one"], "and not True"),
        ([None], ["one"], "and not None"),
        (["a"], "one", "inputs is one str: give a list"),
        (["a"], b"one", "inputs is one bytes: give a list"),
        (["a"], [None], "not of type NoneType"),
        (["a"], [bytearray(b"a")], "not of type bytearray"),
        (["a"], [("one", "id")], "not of type tuple"),
    ],
)
def test_what_is_no_class_or_input_is_said_before_anything_is_sent(
    classes: Any, inputs: Any, words: str
) -> None:
    with (
        serving([]) as (url, bodies),
        Client(url) as client,
        pytest.raises(TypeError, match=words),
    ):
        client.query(classes, inputs)
    assert bodies == []


def test_numbers_of_numpy_are_classes() -> None:
    with serving([]) as (url, bodies), Client(url) as client:
        client.query(np.array([3, 5]), ["one"])
        client.query(np.array(["a"]), ["one"])
    assert [json.loads(body)["classes"] for body in bodies] == [[3, 5], ["a"]]


def test_a_closed_client_asks_no_more() -> None:
    with serving([]) as (url, _):
        client = Client(url)
        client.served()
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.served()


def test_a_token_comes_from_a_file_as_it_is_and_is_never_shown() -> None:
    with answering(b"") as (url, heads):
        with (
            Client(url, token=" secret\n", patience=0) as client,
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
            with pytest.raises(ValueError, match="token is no single word") as found:
                Client(url, token=bad)
            assert "secr" not in str(found.value)
    assert b"Authorization: Bearer secret\r\n" in heads[0]


def test_what_is_no_http_is_neither_sent_again_nor_quoted() -> None:
    wrong: dict[str, Any] = {"headers": {"X": "secret\n"}}
    with answering(b"") as (url, heads):
        asking = Transport(url, None, 5.0, 60.0)
        for ask in (
            lambda: asking.request(Served, "GET", "/", **wrong),
            lambda: asking.request_once("POST", "/", **wrong),
            lambda: next(asking.stream_events(STREAM_EVENTS, "GET", "/", **wrong)),
            lambda: next(
                asking.stream_events(STREAM_EVENTS, "POST", "/", content=iter([b""]), **wrong)
            ),
        ):
            with pytest.raises(ValueError, match="is no HTTP") as found:
                ask()
            assert "secret" not in str(found.value)
        asking.close()
    assert not any(heads)


def test_the_command_says_how_a_token_is_given() -> None:
    answer = b'{"error":{"code":"no_token","message":"no"}}'
    head = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n" % len(answer)
    with (
        answering(head + answer) as (url, _),
        pytest.raises(ValueError, match="requires a token: pass --token-file FILE"),
    ):
        query.query(url, ["a"], text=["one"])


def test_the_command_asks_once_what_is_served() -> None:
    gets: list[str] = []
    app = typer.Typer()
    app.command()(query.query)
    with serving([], gets) as (url, bodies):
        ran = CliRunner().invoke(app, [url, "--class", "a", "--text", "one"])
    assert ran.exit_code == 0, ran.output
    assert (gets, len(bodies)) == (["/v1/model"], 1)
    assert "3.000" in ran.output
    assert "threshold" not in ran.output  # nothing decides


def test_a_token_file_for_a_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--token-file is for a server"):
        query.query(str(tmp_path), ["a"], text=["one"], token_file=tmp_path / "tokens")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "nothing to ask"),
        ([b"image"], "reads texts: give texts"),
        (["x" * 11], "has 11 characters"),
    ],
)
def test_what_cannot_be_asked_is_not_sent(inputs: list, words: str) -> None:
    with (
        serving([]) as (url, bodies),
        Client(url) as client,
        pytest.raises(ValueError, match=words),
    ):
        client.query(["a"], inputs)
    assert bodies == []


def test_the_client_needs_none_of_what_a_server_needs() -> None:
    heavy = {"torch", "ray", "fastapi", "starlette"}
    code = f"import sys, serving.client; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
