"""A real server, started with `kway serve` and queried over HTTP."""

import asyncio
import base64
import json
import os
import re
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from itertools import product
from pathlib import Path
from threading import Thread

import grpc
import httpx
import psutil
import pytest

from serving.schemas import Answer
from tests.quiet_server import QuietServer
from tests.serving.live.servers import CLIENT_REQUESTS, MAX_BODY, MAX_INPUTS, NEVER_QUERIED, TOKEN
from tests.serving.started import (
    Server,
    SharedServer,
    as_json,
    ask,
    error_of,
    of_each,
    replicas_of,
    scores_of,
    session_of,
)
from tests.tiny_bundle import NAMES

# ---------------------------------------------------------------------------- answers


def test_json_forms_and_the_command_give_the_same_answer_as_the_bundle_in_process(
    server: Server, client: httpx.Client, bundle: Path, tokens: Path, images: list[Path]
) -> None:
    two = images[:2]
    fields = {"classes": ["samoyed", "7"], "recall": 0.9}
    answers = [
        client.post("/v1/query", json=as_json(two, **fields)).json(),
        client.post(
            "/v1/query",
            data={
                key: value if isinstance(value, list) else str(value)
                for key, value in fields.items()
            },
            files=[("images", path.read_bytes()) for path in two],
        ).json(),
    ]
    names = ("--class", "samoyed", "--class", "7")
    for source in ((server.url, "--token-file", tokens), (bundle,)):
        answers.append(json.loads(ask(*source, *names, "--recall", 0.9, *two, "--json")))
    here = answers.pop()
    assert [len(result["verdicts"]) for result in here["results"]] == [2, 2]
    assert [v["class_id"] for v in here["results"][1]["verdicts"]] == [2, 6]
    assert [v["threshold_source"] for v in here["results"][0]["verdicts"]] == [
        "guaranteed",
        "pooled",
    ]
    logits = [v["score"] for result in here["results"] for v in result["verdicts"]]
    assert len(set(logits)) == 4
    for found in answers:
        theirs = [v.pop("score") for result in found["results"] for v in result["verdicts"]]
        assert theirs == pytest.approx(logits, rel=1e-5, abs=1e-6)
    for result in here["results"]:
        for verdict in result["verdicts"]:
            del verdict["score"]
    assert all(found == here for found in answers)


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


def test_the_table_printed_by_the_command_shows_classes_and_verdicts(
    bundle: Path, images: list[Path]
) -> None:
    table = ask(bundle, "--class", "husky", "--threshold", "-1000", images[0])
    assert re.search(r"husky .* -1000\.000 .* yes", table)


def test_the_command_splits_images_across_several_requests(
    server: Server, bundle: Path, tokens: Path, images: list[Path]
) -> None:
    many = images * 3
    for source in ((server.url, "--token-file", tokens), (bundle,)):
        found = Answer.model_validate_json(ask(*source, "--class", "husky", "--json", *many))
        assert [result.input for result in found.results] == list(range(18))


# ---------------------------------------------------------------------------- errors


def test_an_unknown_class_returns_404_with_the_nearest_names(
    client: httpx.Client, images: list[Path]
) -> None:
    answer = client.post("/v1/query", json=as_json(images[:1], classes=["husky", "hsky"]))
    status, code, message = error_of(answer)
    assert (status, code) == (404, "unknown_class")
    assert "'husky'" in message


IMAGE = base64.b64encode(b"GIF89a no").decode()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "empty_body"),
        (b" \n", 400, "empty_body"),
        (b"{", 400, "invalid_json"),
        (b'{"classes": ["\xff"]}', 400, "invalid_json"),
        (b'{"classes": ["\\ud800"], "images": ["AAAA"]}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"classes": ' + b"[" * 100_000, 400, "invalid_json"),
        (b"[]", 422, "invalid_query"),
        (b'{"classes": [], "images": ["AAAA"]}', 422, "invalid_query"),
        (b'{"classes": [true], "images": ["AAAA"]}', 422, "invalid_query"),
        (b'{"classes": ["husky"], "images": ["AAAA"], "recal": 0.9}', 422, "invalid_query"),
        (b'{"classes": ["husky"], "images": ["AAAA"], "recall": 0.5}', 422, "invalid_query"),
        (b'{"classes": ["husky"], "images": ["AAAA"], "threshold": NaN}', 422, "invalid_query"),
        (
            b'{"classes": ["husky"], "images": ["AAAA"], "threshold": 1, "recall": 0.9}',
            422,
            "invalid_query",
        ),
        (b'{"classes": [99999999999999999999999], "images": ["AAAA"]}', 404, "unknown_class"),
        (b'{"classes": ["husky"]}', 400, "no_input"),
        (b'{"classes": ["husky"], "texts": ["a dog"]}', 422, "not_a_text_model"),
        (b'{"classes": ["husky"], "images": ["*"]}', 400, "invalid_base64"),
        (b'{"classes": ["husky"], "images": ["AAAA"]}', 400, "not_a_picture"),
        (json.dumps({"classes": [0], "images": [IMAGE]}).encode(), 400, "not_a_picture"),
        (json.dumps({"classes": [0], "images": ["AA=="] * 5}).encode(), 413, "too_many_pictures"),
        (
            json.dumps({"classes": [0] * 101, "images": ["AA=="]}).encode(),
            413,
            "too_many_classes",
        ),
        (b" " * (MAX_BODY + 1), 413, "body_too_large"),
    ],
)
def test_invalid_json_bodies_are_rejected_with_a_reason(
    client: httpx.Client, body: bytes, status: int, code: str
) -> None:
    answer = client.post("/v1/query", content=body, headers={"content-type": "application/json"})
    assert error_of(answer)[:2] == (status, code), answer.text


def test_the_error_for_an_invalid_image_contains_its_index(
    client: httpx.Client, images: list[Path]
) -> None:
    good = images[0].read_bytes()
    files = [("images", good), ("images", b"no image")]
    answer = client.post("/v1/query", data={"classes": ["husky"]}, files=files)
    assert error_of(answer)[2].startswith("images[1]: ")


def form(*fields: tuple[str, str]) -> bytes:
    """Return a multipart form with these fields and an invalid image."""
    parts = [*fields, ('images"; filename="b', "x")]
    head = 'Content-Disposition: form-data; name="'
    return "".join(f'--b\r\n{head}{name}"\r\n\r\n{value}\r\n' for name, value in parts).encode() + (
        b"--b--\r\n"
    )


@pytest.mark.parametrize(
    ("kind", "body", "status", "code"),
    [
        ("multipart/form-data", b"x", 400, "invalid_form"),
        ("multipart/form-data; boundary=b", b"no form at all", 400, "invalid_form"),
        ("multipart/form-data; boundary=b", b"", 422, "invalid_query"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\n/etc/passwd\r\n--b--\r\n',
            422,
            "invalid_query",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="classes"\r\n\r\n\xff\r\n--b--\r\n',
            400,
            "invalid_form",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="classes"\r\n\r\nhusky\r\n'
            + b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\nx\r\n' * 5
            + b"--b--\r\n",
            413,
            "too_many_pictures",
        ),
        *[
            (
                "multipart/form-data; boundary=b",
                form(("classes", "husky"), *fields),
                422,
                "invalid_query",
            )
            for fields in (
                [("threshold", "1"), ("threshold", "2")],
                [("recall", "0.9"), ('recall"; filename="a', "0.9")],
                [('threshold"; filename="a', "1")],
                [('classes"; filename="a', "tabby cat")],
            )
        ],
        (
            "multipart/form-data; boundary=b",
            form(("classes", "husky"), ("texts", "a dog")),
            422,
            "not_a_text_model",
        ),
        ("application/x-www-form-urlencoded", b"classes=husky", 415, "unknown_content_type"),
    ],
)
def test_invalid_forms_are_rejected_with_a_reason(
    client: httpx.Client, kind: str, body: bytes, status: int, code: str
) -> None:
    answer = client.post("/v1/query", content=body, headers={"content-type": kind})
    assert error_of(answer)[:2] == (status, code), answer.text


def raw(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


HEAD = (
    b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer %s\r\n" % TOKEN.encode()
)
# Larger than HAProxy's buffer, so HAProxy forwards the incomplete request to a replica.
UNFINISHED = HEAD + b"Content-Length: 50000\r\n\r\n{" + b" " * 20_000


def test_a_large_body_is_rejected_by_its_content_length_before_it_is_sent(
    server: Server,
) -> None:
    with raw(server) as connection:
        connection.sendall(HEAD + b"Content-Length: 268435456\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_content_length_is_rejected_once_it_is_too_long(server: Server) -> None:
    part = b" " * 65536
    with raw(server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY // len(part) + 1):  # the body never ends
            connection.sendall(b"10000\r\n" + part + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_never_arrives_returns_408(server: Server) -> None:
    with raw(server) as at_proxy, raw(server) as at_replica:
        at_proxy.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        at_replica.sendall(UNFINISHED)
        for connection in (at_proxy, at_replica):
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_150_slow_bodies_do_not_block_other_requests(
    server: Server, client: httpx.Client, images: list[Path]
) -> None:
    """HAProxy buffers only the first 16 kB of a body, so these incomplete bodies reach the
    replicas.
    """
    start = HEAD + b"Content-Length: 200000\r\n\r\n" + b" " * 20_000
    body, slow, deadline = as_json(images[:1], classes=["husky"]), [], time.monotonic() + 30
    with ExitStack() as opened:
        while len(slow) < 150:
            assert time.monotonic() < deadline
            slow.append(opened.enter_context(raw(server)))
            slow[-1].sendall(start)
            # Ray rejects some requests if too many reach a replica at the same time.
            answered = select.select(slow, [], [], 0.002)[0]
            slow = [connection for connection in slow if connection not in answered]
        for _ in range(3):
            assert client.post("/v1/query", json=body).status_code == 200
            for connection in slow:
                connection.sendall(b" ")
        for connection in slow:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_a_loopback_server_without_tokens_rejects_other_host_names(
    open_server: SharedServer,
) -> None:
    url = open_server.get().url
    response = httpx.get(f"{url}/v1/classes", headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "other_host")
    port = url.rpartition(":")[2]
    response = httpx.get(f"{url}/v1/classes", headers={"host": f"localhost:{port}"})
    assert response.status_code == 200


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
            return await asyncio.gather(*(many.post("/v1/query", json=body) for _ in range(300)))

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


# ---------------------------------------------------------------------------- the other routes


def test_classes_are_searched_and_paged(client: httpx.Client) -> None:
    page = client.get("/v1/classes", params={"search": "CAT", "limit": 1, "offset": 1}).json()
    assert page["total"] == 2
    assert page["classes"] == [
        {"id": 4, "name": "siamese cat", "attributes": {"kind": "pet"}, "positives": 5}
    ]
    assert client.get("/v1/classes").json()["total"] == len(NAMES)
    assert error_of(client.get("/v1/classes?limit=x"))[:2] == (422, "invalid_parameter")


def test_the_health_model_and_openapi_routes_respond(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ready"}
    model = client.get("/v1/model").json()
    assert model["limits"]["max_inputs"] == MAX_INPUTS
    assert (model["num_classes"], model["recalls"]) == (len(NAMES), [0.9, 0.99])
    assert model["loss"] == {
        "kind": "batch_ce",
        "aligned": True,
        "score": "logit",
        "eps": 0.0,
    }
    assert "/v1/query" in client.get("/openapi.json").json()["paths"]
    assert error_of(client.get("/nowhere"))[:2] == (404, "no_such_path")
    assert error_of(client.get("/v1/query"))[:2] == (405, "wrong_method")


# ---------------------------------------------------------------------------- the process


def test_ray_services_require_a_token_that_is_stored_only_in_a_private_file(
    server: Server, client: httpx.Client
) -> None:
    session = session_of(server)
    assert session.stat().st_mode & 0o077 == 0
    assert (session / "token").stat().st_mode & 0o177 == 0
    token = (session / "token").read_text()
    assert len(token) == 64
    client.post("/v1/query", content=b"")
    files = [path for path in session.rglob("*") if path.is_file() and path.name != "token"]
    assert len(files) > 10
    assert [path for path in files if token.encode() in path.read_bytes()] == []
    lines = of_each(server, lambda process: " ".join(process.cmdline()))
    assert [line for line in lines if token in line] == []
    named = of_each(server, lambda process: (process, process.name()))
    (gcs,) = [process for process, name in named if name == "gcs_server"]
    (port,) = {c.laddr.port for c in gcs.net_connections() if c.status == psutil.CONN_LISTEN}
    method = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.unary_unary(method)(b"", metadata=[("authorization", f"Bearer {token}")])
        for given in ([], [("authorization", "Bearer " + "0" * 64)]):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"", metadata=given)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


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


@pytest.fixture
def serve_error(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one-line error of a `kway serve` that fails to start."""

    def serve(*arguments: object) -> str:
        assert kway("serve", *arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        return shown.err

    return serve


def test_a_port_in_use_prints_one_line_and_exits_with_2(
    serve_error: Callable[..., str], server: Server, bundle: Path
) -> None:
    port = server.url.rsplit(":", 1)[1]
    line = serve_error(bundle, "--port", port)
    assert re.fullmatch(rf"error: .* port {port} .*--port\n", line), line


def test_a_folder_that_is_not_a_bundle_is_rejected_before_anything_starts(
    serve_error: Callable[..., str], tmp_path: Path
) -> None:
    line = serve_error(tmp_path, "--port", 0)
    assert re.fullmatch(rf"error: .*{tmp_path}.* bundle.*\n", line), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{tmp}", "--class", "husky", "{image}"), "bundle"),
        (("{bundle}", "--class", "hsky", "{image}"), "'husky'"),
        (
            ("{url}", "--token-file", "{tokens}", "--class", "hsky", "{image}"),
            "'husky'",
        ),
        (("{bundle}", "--class", "husky", "{tmp}/none.png"), "none.png"),
        (("{bundle}", "--class", "husky", "{bundle}/bundle.json"), "bundle.json"),
        (
            ("{url}", "--token-file", "{tokens}", "--class", "husky", "{bundle}/bundle.json"),
            "images[0]",
        ),
        (("{bundle}", "--class", "husky", "--threshold", "nan", "{image}"), "finite"),
        (("{bundle}", "--class", "husky", "--threshold", "inf", "{image}"), "finite"),
        (("http://127.0.0.1:1", "--class", "husky", "{image}"), "http://127.0.0.1:1"),
    ],
)
def test_an_invalid_query_prints_a_one_line_error(
    server: Server,
    bundle: Path,
    tokens: Path,
    images: list[Path],
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    values = {
        "tmp": tmp_path,
        "bundle": bundle,
        "tokens": tokens,
        "url": server.url,
        "image": images[0],
    }
    with pytest.raises((ValueError, OSError), match=re.escape(message)) as caught:
        ask(*(argument.format(**values) for argument in arguments))
    assert "\n" not in str(caught.value)


class _OtherServer(BaseHTTPRequestHandler):
    """Responds to every request with 200 and a body that kway would not send."""

    answer = b"{}"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"limits": {"max_inputs": "many"}}', b"<p>"])
def test_querying_a_server_other_than_kway_prints_a_one_line_error(
    images: list[Path], answer: bytes
) -> None:
    handler = type("Handler", (_OtherServer,), {"answer": answer})
    with QuietServer(("127.0.0.1", 0), handler) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        try:
            with pytest.raises(ValueError, match=str(other.server_port)) as caught:
                ask(f"http://127.0.0.1:{other.server_port}", "--class", "husky", images[0])
        finally:
            other.shutdown()
            thread.join(60)
    assert "\n" not in str(caught.value)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["class_weights.safetensors", "backbone.safetensors"])
def test_a_corrupted_bundle_is_not_served(
    serve_error: Callable[..., str], bundle: Path, tmp_path: Path, name: str
) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    flip(copy / name)
    line = serve_error(copy, "--port", 0, "--verify")
    assert re.fullmatch(rf"error: .*{name}.*checksum.*\n", line), line


def test_a_query_verifies_the_whole_bundle_except_its_class_weights(
    bundle: Path, images: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    flip(copy / "class_weights.safetensors")  # of the last class, which is not queried
    assert "husky" in ask(copy, "--class", "husky", images[0])
    flip(copy / "backbone.safetensors")
    with pytest.raises(ValueError, match=r"backbone\.safetensors.*checksum"):
        ask(copy, "--class", "husky", images[0])


def test_only_replicas_load_torch_and_no_process_loads_pandas(
    server: Server, client: httpx.Client
) -> None:
    assert client.get("/no-such-path").status_code == 404  # `kway serve` counts it

    def libraries(process: psutil.Process) -> tuple[int, str]:
        return process.pid, " ".join(one.path for one in process.memory_maps())

    found = of_each(server, libraries)
    assert {pid for pid, paths in found if "/libtorch" in paths} == set(replicas_of(server))
    assert {pid for pid, paths in found if "/pandas/" in paths} == set()


def test_no_server_process_has_a_lower_priority_than_the_command(
    server: Server,
) -> None:
    """By default, Ray runs replicas and HAProxy at nice 15, where any other process can starve
    them.
    """
    (command, *others) = of_each(server, lambda process: (process.nice(), process.name()))
    assert [other for other in others if other[0] > command[0]] == []
