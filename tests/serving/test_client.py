"""The Python client: what it asks again, what it takes as final, and how it splits a question."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from launch.commands import query
from serving.client import Client, RefusedError

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
    first: list[Answer | None], gets: list[str] | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers before it answers in earnest; None: it hangs up."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if gets is not None:
                gets.append(self.path)
            self._say((200, {}, json.dumps(_MODEL).encode()))

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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
        pytest.raises(OSError, match="no answer from"),
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
    with pytest.raises(ValueError, match="is no URL of a server"):
        Client("ftp://a")


def test_a_question_is_split_by_the_servers_limits_and_joined_in_order() -> None:
    texts = ["x" * length for length in (1, 2, 3, 4, 5)]
    with serving([]) as (url, bodies), Client(url) as client:
        found = client.query(["a", 7], texts)
    assert [result.verdicts[0].score for result in found.results] == [1, 2, 3, 4, 5]
    assert [result.input for result in found.results] == [0, 1, 2, 3, 4]
    assert [len(json.loads(body)["texts"]) for body in bodies] == [2, 2, 1]
    assert json.loads(bodies[0])["classes"] == ["a", "#7"]


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
    with pytest.raises(ValueError, match="only a server asks for a token"):
        query.query(str(tmp_path), ["a"], text=["one"], token_file=tmp_path / "tokens")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "nothing to ask"),
        ([b"picture"], "reads texts: give texts"),
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


def test_the_client_needs_neither_torch_nor_ray() -> None:
    code = "import sys, serving.client; sys.exit(bool({'torch', 'ray'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
