"""`POST /v1/query:stream` answers lines while the body is still arriving, and limits them."""

import asyncio
import base64
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from serving.http.streams import split_lines
from serving.model import Model
from serving.service import Service
from serving.statistics import REQUESTS
from tests.serving.bad_images import encoded
from tests.serving.in_process import NoCounts, application, ask, post, refusal
from tests.tiny_bundle import write, write_of_texts

MAX_BODY, IN_FLIGHT, STREAMS = 20_000, 4, 2
NDJSON = "application/x-ndjson"
URL = "/v1/query:stream"
TEXTS = ["a cat", "a dog", "hund", "猫", "a dog and a cat"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_of_texts(tmp_path_factory.mktemp("bundles") / "texts")


def build(bundle: Path, idle_seconds: float) -> FastAPI:
    return application(
        bundle,
        max_body_bytes=MAX_BODY,
        max_text_chars=10_000,
        max_lines_in_flight=IN_FLIGHT,
        max_streams=STREAMS,
        stream_idle_seconds=idle_seconds,
    )


@pytest.fixture
def api(bundle: Path) -> FastAPI:
    return build(bundle, idle_seconds=30)


@pytest.fixture
def hasty(bundle: Path) -> FastAPI:
    return build(bundle, idle_seconds=0.3)


def lines_of(*lines: object) -> bytes:
    return b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in lines)


def streamed(api: FastAPI, query: str, body: bytes) -> list[dict]:
    answer = post(api, URL + query, body, NDJSON)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == NDJSON
    return [json.loads(line) for line in answer.text.splitlines()]


def scores(api: FastAPI, texts: list[str], name: str = "husky") -> list[float]:
    found = ask(api, "POST", "/v1/query", json={"classes": [name], "texts": texts}).json()
    return [one["verdicts"][0]["score"] for one in found["results"]]


class Conversation:
    """A client that reads while it sends. `read` waits for the next line and returns None at the
    end of the stream.
    """

    def __init__(self, send: Callable[[bytes | None], Awaitable[None]], lines: asyncio.Queue):
        self.send, self._lines = send, lines
        self.num_received = 0  # messages that the server has received

    async def read(self) -> Any:
        async with asyncio.timeout(60):
            return await self._lines.get()


@asynccontextmanager
async def conversation(
    api: FastAPI, query: str = "?classes=husky", *, reads: bool = True
) -> AsyncIterator[Conversation]:
    """Open a stream that calls the ASGI application directly, as a server does. `send(None)`
    disconnects the client."""
    body: asyncio.Queue = asyncio.Queue()
    lines: asyncio.Queue = asyncio.Queue()

    async def receive() -> dict:
        message = await body.get()
        talk.num_received += 1
        return message

    async def send(message: dict) -> None:
        if not reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the buffers of an unread connection are full
        for line in message.get("body", b"").splitlines():
            await lines.put(json.loads(line))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await lines.put(None)

    async def client_send(part: bytes | None) -> None:
        kind = "http.request" if part is not None else "http.disconnect"
        await body.put({"type": kind, "body": part or b"", "more_body": True})

    talk = Conversation(client_send, lines)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": URL, "raw_path": URL.encode(), "query_string": query[1:].encode(),
        "headers": [(b"content-type", NDJSON.encode())], "root_path": "", "scheme": "http",
    }  # fmt: skip
    running = asyncio.create_task(api(scope, receive, send))
    try:
        yield talk
    finally:
        await body.put({"type": "http.request", "body": b"", "more_body": False})
        async with asyncio.timeout(60):
            await running


# ---------------------------------------------------------------------------- responses


def test_lines_are_answered_in_order_with_their_ids_and_counts_at_the_end(api: FastAPI) -> None:
    ids = ["first", 2, None, "", -5]
    body = lines_of(*({"text": text, "id": id_} for text, id_ in zip(TEXTS, ids, strict=True)))
    *found, last = streamed(api, "?classes=husky", body)
    assert [one["line"] for one in found] == [0, 1, 2, 3, 4]
    assert [one.get("id") for one in found] == ids
    returned = [one["verdicts"][0]["score"] for one in found]
    assert returned == pytest.approx(scores(api, TEXTS), rel=1e-4, abs=1e-5)
    assert len(set(returned)) == 5
    assert last == {"done": {"inputs": 5, "hits": None, "errors": 0}}


def test_only_matches_are_returned_unless_all_verdicts_are_requested(api: FastAPI) -> None:
    known = scores(api, TEXTS)
    threshold = sorted(known)[3] - 1e-3  # two of the five scores are above it
    body = lines_of(*({"text": text} for text in TEXTS))
    *found, last = streamed(api, f"?classes=husky&threshold={threshold}", body)
    hits = [line for line, score in enumerate(known) if score > threshold]
    assert [one["line"] for one in found] == hits
    assert all(one["verdicts"][0]["match"] for one in found)
    assert last == {"done": {"inputs": 5, "hits": 2, "errors": 0}}
    *found, last = streamed(api, f"?classes=husky&threshold={threshold}&all=true", body)
    assert [one["verdicts"][0]["match"] for one in found] == [score > threshold for score in known]
    assert last["done"]["hits"] == 2


def test_a_hit_contains_only_the_matching_classes(api: FastAPI) -> None:
    both = {name: scores(api, TEXTS[:1], name)[0] for name in ("husky", "samoyed")}
    threshold = sum(both.values()) / 2
    higher = max(both, key=lambda name: both[name])
    found = streamed(
        api, f"?classes=husky&classes=samoyed&threshold={threshold}", lines_of({"text": TEXTS[0]})
    )
    assert [one["class"] for one in found[0]["verdicts"]] == [higher]


def test_an_image_model_accepts_base64_and_data_urls(tmp_path: Path) -> None:
    api = application(write(tmp_path / "b"))
    text = base64.b64encode(encoded(Image.radial_gradient("L"), "png")).decode()
    body = lines_of({"image": text}, {"image": "data:image/png;base64," + text}, {"image": "AAAA"})
    first, second, third, last = streamed(api, "?classes=husky", body)
    assert first["verdicts"] == second["verdicts"]
    assert third["error"]["code"] == "not_a_picture"
    assert "JPEG" in third["error"]["message"]
    assert last["done"] == {"inputs": 2, "hits": None, "errors": 1}


def test_every_line_from_an_unaligned_model_has_a_notice(tmp_path: Path) -> None:
    path = write(tmp_path / "b")
    file = path / "bundle.json"
    content = json.loads(file.read_text())
    content["model"]["loss"].update(kind="softmax_ce", aligned=False)
    file.write_text(json.dumps(content))
    text = base64.b64encode(encoded(Image.radial_gradient("L"), "png")).decode()
    first, _ = streamed(application(path), "?classes=husky", lines_of({"image": text}))
    assert "softmax_ce" in first["notice"]


# ---------------------------------------------------------------------------- invalid lines


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b"[" * 15_000, "invalid_json"),
        (b'{"text": "\xff"}', "invalid_json"),
        (b'{"text": "\\ud800"}', "invalid_json"),
        (b'{"text": "a", "text": "b"}', "invalid_json"),
        (b"[]", "invalid_line"),
        (b"NaN", "invalid_line"),
        (b"{}", "invalid_line"),
        (b'{"text": 7}', "invalid_line"),
        (b'{"text": "a", "image": "AAAA"}', "invalid_line"),
        (b'{"text": "a", "path": "/etc/passwd"}', "invalid_line"),
        (b'{"text": "a", "id": 1.5}', "invalid_line"),
        (b'{"text": "a", "id": "' + b"x" * 201 + b'"}', "invalid_line"),
        (b'{"text": "a", "id": ' + b"9" * 100 + b"}", "invalid_line"),
        (b'{"image": "AAAA"}', "not_a_picture_model"),
        (b'{"text": "' + b"x" * 10_001 + b'"}', "text_too_long"),
        (b'{"text": "' + b"x" * MAX_BODY + b'"}', "line_too_long"),
    ],
)
def test_an_invalid_line_is_reported_in_order_and_the_stream_continues(
    api: FastAPI, line: bytes, code: str
) -> None:
    body = b"\r\n".join([lines_of({"text": "a cat"})[:-1], line, b' {"text": "a cat"} '])
    first, invalid, third, last = streamed(api, "?classes=husky", body)
    assert (first["line"], invalid["line"], third["line"]) == (0, 1, 2)
    assert first["verdicts"] == third["verdicts"]
    assert invalid["error"]["code"] == code
    assert last["done"] == {"inputs": 2, "hits": None, "errors": 1}


def test_the_error_for_an_invalid_line_contains_its_id(api: FastAPI) -> None:
    invalid, _ = streamed(api, "?classes=husky", lines_of({"id": "frame 7", "txt": "a"}))
    assert (invalid["id"], invalid["error"]["message"]) == (
        "frame 7",
        "txt: Extra inputs are not permitted",
    )


def test_a_line_that_is_too_long_is_not_buffered() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b"x" * 2**16
        yield b"\nshort\n"
        yield b"y" * 2**18

    async def scenario() -> list[bytes | None]:
        return [line async for line in split_lines(parts(), 2**17)]

    tracemalloc.start()
    try:
        assert asyncio.run(scenario()) == [None, b"short", None]
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("query", "kind", "status", "code"),
    [
        ("", NDJSON, 422, "invalid_query"),
        ("?classes=hsky", NDJSON, 404, "unknown_class"),
        ("?classes=husky&recall=0.5", NDJSON, 422, "invalid_query"),
        ("?classes=husky&al=true", NDJSON, 422, "invalid_parameter"),
        ("?" + "classes=husky&" * 101, NDJSON, 413, "too_many_classes"),
        ("?classes=husky", "application/json", 415, "unknown_content_type"),
    ],
)
def test_an_invalid_query_is_rejected_before_the_first_line(
    api: FastAPI, query: str, kind: str, status: int, code: str
) -> None:
    assert refusal(post(api, URL + query, lines_of({"text": "a"}), kind)) == (status, code)


@pytest.mark.parametrize("body", [b"", b"\n\n \n"])
def test_a_stream_without_lines_returns_zero_counts(api: FastAPI, body: bytes) -> None:
    assert streamed(api, "?classes=husky", body) == [
        {"done": {"inputs": 0, "hits": None, "errors": 0}}
    ]


# ---------------------------------------------------------------------------- during the body


def test_a_line_sent_byte_by_byte_is_answered_before_the_next_one(
    api: FastAPI,
) -> None:
    async def scenario() -> None:
        async with conversation(api) as talk:
            for position, text in enumerate(TEXTS):
                for byte in lines_of({"text": text}):
                    await talk.send(bytes([byte]))
                assert (await talk.read())["line"] == position

    asyncio.run(scenario())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """The event that a model waits for before it responds, and the sizes of the model's batches."""
    opened, sizes = threading.Event(), []
    plain = Model.features

    def features(self: Model, prepared: Any) -> Any:
        if len(sizes):  # the first batch comes from the self-check
            assert opened.wait(60)
        sizes.append(len(prepared))
        return plain(self, prepared)

    monkeypatch.setattr(Model, "features", features)
    yield opened, sizes
    opened.set()


def test_lines_are_batched_and_reading_pauses_at_the_limit(
    gate: tuple[threading.Event, list[int]], api: FastAPI
) -> None:
    opened, sizes = gate

    async def scenario() -> None:
        async with conversation(api) as talk:
            for _ in range(30):
                await talk.send(lines_of({"text": "a cat"}))
            await asyncio.sleep(0.2)
            # The lines in flight, one whose answer is being written, and one that is waiting for a
            # free slot.
            assert talk.num_received <= IN_FLIGHT + 2
            opened.set()
            assert [(await talk.read())["line"] for _ in range(30)] == list(range(30))

    asyncio.run(scenario())
    assert max(sizes[1:]) > 1


def test_the_lines_in_flight_are_limited_to_the_byte_limit_of_a_request(
    gate: tuple[threading.Event, list[int]], api: FastAPI
) -> None:
    opened, _ = gate
    long = "x" * 9_000  # two of them fit into 20,000 bytes

    async def scenario() -> None:
        async with conversation(api) as talk:
            for _ in range(4):
                await talk.send(lines_of({"text": long}))
            await asyncio.sleep(0.2)
            assert talk.num_received == 3  # the third has been read and is waiting
            opened.set()
            assert [(await talk.read())["line"] for _ in range(4)] == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_a_full_queue_delays_a_stream_but_its_lines_succeed(
    bundle: Path,
) -> None:
    small = application(bundle, max_queued_inputs=1, batch_size=1, max_lines_in_flight=8)

    def counts() -> dict[str, float]:
        statistics = small.state.resources.of().service.statistics.series()
        return {labels["result"]: count for name, labels, count in statistics if name == REQUESTS}

    *found, last = streamed(small, "?classes=husky", lines_of(*[{"text": "a cat"}] * 20))
    assert [one["line"] for one in found] == list(range(20))
    assert last["done"]["errors"] == 0
    assert counts() == {"success": 20, "fail": 0}
    body = {"classes": ["husky"], "texts": ["a cat", "a dog"]}
    assert ask(small, "POST", "/v1/query", json=body).status_code == 429
    assert counts() == {"success": 20, "fail": 1}


def test_a_line_that_times_out_is_reported_and_the_stream_continues(
    gate: tuple[threading.Event, list[int]], bundle: Path
) -> None:
    opened, _ = gate
    quick = application(bundle, request_timeout_seconds=0.2, stream_idle_seconds=5)

    async def scenario() -> None:
        async with conversation(quick) as talk:
            await talk.send(lines_of({"text": "a cat"}))
            assert (await talk.read())["error"]["code"] == "timeout"
            opened.set()
            await talk.send(lines_of({"text": "a cat"}))
            assert (await talk.read())["verdicts"]

    asyncio.run(scenario())


@pytest.mark.parametrize("part", [b"", b'{"text'])
def test_an_idle_stream_is_closed_with_an_error(hasty: FastAPI, part: bytes) -> None:
    async def scenario() -> None:
        async with conversation(hasty) as talk:
            await talk.send(lines_of({"text": "a cat"}) + part)
            assert (await talk.read())["line"] == 0
            error = await talk.read()
            assert error["error"]["code"] == "idle"
            assert "line" not in error
            assert (await talk.read())["done"]["inputs"] == 1
            assert await talk.read() is None

    asyncio.run(scenario())


def test_empty_lines_keep_a_stream_open(bundle: Path) -> None:
    async def scenario() -> None:
        async with conversation(build(bundle, idle_seconds=1)) as talk:
            for _ in range(4):
                await asyncio.sleep(0.3)
                await talk.send(b"\n")
            await talk.send(lines_of({"text": "a cat"}))
            assert (await talk.read())["line"] == 4

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_disconnected_and_frees_its_slot(hasty: FastAPI) -> None:
    async def scenario() -> None:
        for _ in range(STREAMS + 1):
            async with conversation(hasty, reads=False) as talk:
                await talk.send(lines_of({"text": "a cat"}))

    asyncio.run(scenario())
    assert streamed(hasty, "?classes=husky", b"")


def test_a_client_that_disconnects_frees_its_slot(
    gate: tuple[threading.Event, list[int]], api: FastAPI
) -> None:
    async def scenario() -> None:
        for _ in range(STREAMS + 1):
            async with conversation(api) as talk:
                await talk.send(lines_of({"text": "a cat"}))
                await talk.send(None)

    asyncio.run(scenario())
    gate[0].set()
    assert streamed(api, "?classes=husky", b"")


def test_too_many_streams_are_rejected_with_retry_after(api: FastAPI) -> None:
    async def scenario() -> httpx.Response:
        async with conversation(api) as first, conversation(api) as second:
            for talk in (first, second):
                await talk.send(lines_of({"text": "a cat"}))
                assert (await talk.read())["line"] == 0
            transport = httpx.ASGITransport(app=api)
            async with httpx.AsyncClient(transport=transport, base_url="http://kway") as client:
                return await client.post(URL + "?classes=husky", headers={"content-type": NDJSON})

    answer = asyncio.run(scenario())
    assert refusal(answer) == (429, "too_many_streams")
    assert answer.headers["retry-after"]
    assert streamed(api, "?classes=husky", b"")


def test_an_internal_error_ends_a_stream_without_counts(
    api: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(Service, "answer", fails)

    async def scenario() -> None:
        async with conversation(api) as talk:
            await talk.send(lines_of({"text": "a cat"}))

    with pytest.raises(RuntimeError, match="the device is gone"):
        asyncio.run(scenario())


class Counted(NoCounts):
    def __init__(self) -> None:
        self.requests: list[tuple[str, bool]] = []

    def count(self, *, outcome: str, inputs: int, seconds: float | None) -> None:
        self.requests.append((outcome, seconds is not None))


def test_streams_including_rejected_ones_are_counted_but_not_timed(bundle: Path) -> None:
    counted = Counted()
    api = application(bundle, counted, max_streams=1)

    async def scenario() -> None:
        async with conversation(api) as talk:
            await talk.send(lines_of({"text": "a cat"}))
            assert (await talk.read())["line"] == 0
            await asyncio.to_thread(post, api, URL + "?classes=husky", b"", NDJSON)

    asyncio.run(scenario())
    assert counted.requests[0] == ("too_many_streams", False)
    assert counted.requests[1][1] is False
    scores(api, ["a cat"])
    assert counted.requests[2:] == [("ok", True)]
