"""Limits, timeouts, cross-origin requests and expiry of feeds, listeners and watches."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from tests.serving.watching import (
    BOB,
    NDJSON,
    Kway,
    alice,
    create_watch,
    eventually,
    feeding,
    frames,
    images,
    listening,
    running,
    send_frames,
)

pytestmark = pytest.mark.slow

__all__ = ["alice", "images"]  # fixtures
IDLE_SECONDS = 1.0


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    limits = {
        "min_watch_ttl_seconds": 0.2,
        "feed_idle_seconds": IDLE_SECONDS,
        "max_feeds": 4,
        "max_feeds_per_client": 3,
        "max_listeners": 4,
        "max_listeners_per_client": 3,
        "max_watch_listeners": 2,
    }
    with running(tmp_path_factory.mktemp("ends"), **limits) as opened:
        yield opened


@pytest.fixture(scope="module")
def open_kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    """Start a server without tokens."""
    with running(tmp_path_factory.mktemp("open"), has_tokens=False) as opened:
        yield opened


def close_reason(socket: ClientConnection) -> tuple[int, str, str]:
    """Return the close code of a WebSocket and the code and message of its last error."""
    error = json.loads(socket.recv(timeout=20))["error"]
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=20)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, error["code"], error["message"].partition(". ")[0]


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"].partition(". ")[0]


# -- limits per client and per replica ---------------------------------------------------------


def test_feeds_are_limited_per_client_and_per_server(kway: Kway, alice: httpx.Client) -> None:
    own = (4429, "too_many_feeds", "you have reached your limit of 3 feeds")
    with ExitStack() as opened:
        for feed in "abc":
            opened.enter_context(kway.socket(f"/v1/feeds/{feed}/frames"))
        eventually(lambda: kway.feeds.live._followers == 3)
        with kway.socket("/v1/feeds/d/frames") as fourth:
            assert close_reason(fourth) == own
        response = alice.post("/v1/feeds/d", content=b"", headers=NDJSON)
        assert error_of(response) == (429, *own[1:])
        assert response.headers["retry-after"] == "5"
        with kway.socket("/v1/feeds/d/frames", BOB) as bobs:
            eventually(lambda: kway.feeds.live._followers == 4)
            with kway.socket("/v1/feeds/d/frames", BOB) as fifth:
                total = "the server has reached its limit of 4 feeds"
                assert close_reason(fifth) == (4429, "too_many_feeds", total)
            bobs.close()
    eventually(lambda: kway.feeds.live._followers == 0)
    assert alice.post("/v1/feeds/d", content=b"", headers=NDJSON).status_code == 200


def test_listeners_are_limited_per_client_and_per_server(kway: Kway, alice: httpx.Client) -> None:
    first, second = create_watch(alice)["id"], create_watch(alice)["id"]
    with kway.client(BOB) as bob:
        bobs = create_watch(bob)["id"]
    with ExitStack() as opened:
        for watch_id in (first, first, second):
            socket = opened.enter_context(kway.socket(f"/v1/watches/{watch_id}/live"))
            assert json.loads(socket.recv())["listening"] == watch_id
        own = "you have reached your limit of 3 listeners"
        response = alice.get(f"/v1/watches/{second}/hits")
        assert error_of(response) == (429, "too_many_listeners", own)
        with kway.socket(f"/v1/watches/{second}/live") as fourth:
            assert close_reason(fourth) == (4429, "too_many_listeners", own)
        socket = opened.enter_context(kway.socket(f"/v1/watches/{bobs}/live", BOB))
        assert json.loads(socket.recv())["listening"] == bobs
        with kway.socket(f"/v1/watches/{bobs}/live", BOB) as fifth:
            total = "the server has reached its limit of 4 listeners"
            assert close_reason(fifth) == (4429, "too_many_listeners", total)
        response = alice.get(f"/v1/watches/{second}/hits")
        assert error_of(response) == (429, "too_many_listeners", total)
    eventually(lambda: not kway.board._listeners._by_watch)
    with listening(alice, second):
        pass


# -- idle feeds --------------------------------------------------------------------------------


def test_an_idle_feed_is_closed_with_a_reason(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice)
    with (
        feeding(kway.url, "/v1/feeds/door") as feed,
        kway.socket("/v1/feeds/door/frames") as socket,
    ):
        feed.send(frames(images[:1]))
        socket.send(images[0])
        assert feed.line()["watch"] == made["id"]  # before the request body ends
        assert json.loads(socket.recv())["watch"] == made["id"]
        line = feed.line()
        assert line is not None
        assert line["error"]["code"] == "idle"
        assert feed.line() is None
        assert close_reason(socket)[:2] == (4408, "idle")
    eventually(lambda: kway.feeds.live._followers == 0)


def test_empty_lines_and_messages_keep_a_feed_open(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice)
    with (
        feeding(kway.url, "/v1/feeds/door") as feed,
        kway.socket("/v1/feeds/door/frames") as socket,
    ):
        deadline = time.monotonic() + 1.5 * IDLE_SECONDS
        while time.monotonic() < deadline:
            feed.send(b"\n")
            socket.send("")
            time.sleep(IDLE_SECONDS / 10)
        feed.send(frames(images[:1]))
        socket.send(images[0])
        for hit in (feed.line(), json.loads(socket.recv())):
            assert (hit["watch"], hit["frame"]) == (made["id"], 0)
        feed.finish()
        assert feed.line() == {"done": {"frames": 1, "hits": 1, "errors": 0, "dropped": 0}}
        assert feed.line() is None


@contextmanager
def logged_by_uvicorn(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Record what uvicorn logs. Its logger does not propagate."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


# -- cross-origin requests ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1", "null", ""]
)
@pytest.mark.parametrize("path", ["/v1/feeds/door/frames", "/v1/watches/{}/live"])
def test_cross_origin_websockets_are_rejected_without_tokens(
    open_kway: Kway, path: str, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_kway.client() as client, logged_by_uvicorn(caplog):
        path = path.format(create_watch(client)["id"])
        with open_kway.socket(path, Origin=origin) as socket:
            assert close_reason(socket)[:2] == (4403, "other_origin")
        client.get("/health")  # by then, the server has handled the end of the WebSocket
    assert not caplog.records
    assert open_kway.feeds.live._followers == 0
    assert not open_kway.board._listeners._by_watch


def test_same_origin_websockets_and_websockets_with_a_token_are_accepted(
    kway: Kway, open_kway: Kway
) -> None:
    for server, origin in ((open_kway, open_kway.url), (kway, "https://cameras.example")):
        with server.socket("/v1/feeds/door/frames", Origin=origin) as socket:
            socket.send("{")
            line = json.loads(socket.recv())
            assert (line["frame"], line["error"]["code"]) == (0, "invalid_json")
    with pytest.raises(Exception, match="401"):
        kway.socket("/v1/feeds/door/frames", token="c" * 32, Origin=kway.url)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types_of_cross_site_forms_are_rejected(open_kway: Kway, kind: str) -> None:
    """Browsers send these content types to other origins without a CORS preflight."""
    with open_kway.client() as client:
        for path in ("/v1/feeds/door", "/v1/watches"):
            response = client.post(path, content=b"{}", headers={"content-type": kind})
            assert error_of(response)[:2] == (415, "unknown_content_type")


# -- expiry ------------------------------------------------------------------------------------


def test_an_expired_watch_closes_its_listeners_with_a_reason(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice, ttl_seconds=1)
    with (
        listening(alice, made["id"]) as lines,
        kway.socket(f"/v1/watches/{made['id']}/live") as socket,
        kway.client() as second,
    ):
        socket.recv()
        send_frames(second, frames(images[:1]))
        for hit in (next(lines), json.loads(socket.recv())):
            assert hit["watch"] == made["id"]
        eventually(lambda: second.get("/v1/watches").json() == {"watches": []})
        assert next(lines) == json.loads(socket.recv()) == {"end": "expired"}
        assert next(lines, None) is None
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1000
    assert error_of(alice.get(f"/v1/watches/{made['id']}/hits"))[:2] == (404, "unknown_watch")


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_changing_the_system_clock_does_not_affect_expiry(
    kway: Kway,
    alice: httpx.Client,
    images: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    jump: float,
) -> None:
    long, short = create_watch(alice), create_watch(alice, ttl_seconds=0.5)
    with listening(alice, long["id"]) as lines, kway.client() as second:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        eventually(lambda: len(second.get("/v1/watches").json()["watches"]) == 1)
        hits = send_frames(second, frames(images[:1]))
        assert [line.get("watch") for line in hits] == [long["id"], None]
        assert next(lines)["watch"] == long["id"]
    assert error_of(alice.get(f"/v1/watches/{short['id']}"))[:2] == (404, "unknown_watch")
