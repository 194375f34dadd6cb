"""How feeds, listeners and watches end, and who is not let in: limits of one client, silence,
another site's page, time that is over, a clock that is set."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from tests.serving.watching import (
    BOB,
    NDJSON,
    Kway,
    alice,
    eventually,
    feeding,
    frames,
    images,
    listening,
    running,
    send,
    watch,
)

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
    """A server without tokens."""
    with running(tmp_path_factory.mktemp("open"), has_tokens=False) as opened:
        yield opened


def told(socket: ClientConnection) -> tuple[int, str, str]:
    """Close code, error code and message of a socket's last words."""
    error = json.loads(socket.recv(timeout=20))["error"]
    with pytest.raises(ConnectionClosed) as caught:
        socket.recv(timeout=20)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, error["code"], error["message"]


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


# -- limits of a client and of a replica -------------------------------------------------------


def test_a_client_may_have_so_many_feeds_and_others_still_have_theirs(
    kway: Kway, alice: httpx.Client
) -> None:
    own = (4429, "too_many_feeds", "your limit of 3 feeds is reached. Close one first")
    with ExitStack() as opened:
        for feed in "abc":
            opened.enter_context(kway.socket(f"/v1/feeds/{feed}/frames"))
        eventually(lambda: kway.feeds.live._followers == 3)
        with kway.socket("/v1/feeds/d/frames") as fourth:
            assert told(fourth) == own
        answer = alice.post("/v1/feeds/d", content=b"", headers=NDJSON)
        assert refused(answer) == (429, *own[1:])
        assert answer.headers["retry-after"] == "5"
        with kway.socket("/v1/feeds/d/frames", BOB) as bobs:
            eventually(lambda: kway.feeds.live._followers == 4)
            with kway.socket("/v1/feeds/d/frames", BOB) as fifth:
                all_ = "the server's limit of 4 feeds is reached. Try again later"
                assert told(fifth) == (4429, "too_many_feeds", all_)
            bobs.close()
    eventually(lambda: kway.feeds.live._followers == 0)
    assert alice.post("/v1/feeds/d", content=b"", headers=NDJSON).status_code == 200


def test_a_client_may_have_so_many_listeners_over_all_its_watches(
    kway: Kway, alice: httpx.Client
) -> None:
    first, second = watch(alice)["id"], watch(alice)["id"]
    with kway.client(BOB) as bob:
        bobs = watch(bob)["id"]
    with ExitStack() as opened:
        for watch_id in (first, first, second):
            socket = opened.enter_context(kway.socket(f"/v1/watches/{watch_id}/live"))
            assert json.loads(socket.recv()) == {"listening": watch_id}
        own = "3 listen to your watches, and no more may: end one of them"
        answer = alice.get(f"/v1/watches/{second}/hits")
        assert refused(answer) == (429, "too_many_listeners", own)
        with kway.socket(f"/v1/watches/{second}/live") as fourth:
            assert told(fourth) == (4429, "too_many_listeners", own)
        socket = opened.enter_context(kway.socket(f"/v1/watches/{bobs}/live", BOB))
        assert json.loads(socket.recv()) == {"listening": bobs}
        with kway.socket(f"/v1/watches/{bobs}/live", BOB) as fifth:
            all_ = "the server's limit of 4 listeners is reached. Try again later"
            assert told(fifth) == (4429, "too_many_listeners", all_)
        answer = alice.get(f"/v1/watches/{second}/hits")
        assert refused(answer) == (429, "too_many_listeners", all_)
    eventually(lambda: not kway.board._listeners.listened())
    with listening(alice, second):
        pass


# -- silence -----------------------------------------------------------------------------------


def test_a_feed_without_a_frame_for_too_long_ends_with_its_reason(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice)
    reason = f"no frame arrived for {IDLE_SECONDS:g} s. Send an empty line from time to time"
    with (
        feeding(kway.url, "/v1/feeds/door") as feed,
        kway.socket("/v1/feeds/door/frames") as socket,
    ):
        feed.send(frames(images[:1]))
        socket.send(images[0])
        assert feed.line()["watch"] == made["id"]  # before the body's end
        assert json.loads(socket.recv())["watch"] == made["id"]
        assert feed.line() == {"error": {"code": "idle", "message": reason}}
        assert feed.line() is None
        assert told(socket) == (4408, "idle", reason)
    eventually(lambda: kway.feeds.live._followers == 0)


def test_empty_lines_and_messages_keep_a_feed_alive(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice)
    with (
        feeding(kway.url, "/v1/feeds/door") as feed,
        kway.socket("/v1/feeds/door/frames") as socket,
    ):
        until = time.monotonic() + 1.5 * IDLE_SECONDS
        while time.monotonic() < until:
            feed.send(b"\n")
            socket.send("")
            time.sleep(IDLE_SECONDS / 10)
        feed.send(frames(images[:1]))
        socket.send(images[0])
        for heard in (feed.line(), json.loads(socket.recv())):
            assert (heard["watch"], heard["frame"]) == (made["id"], 0)
        feed.finish()
        assert feed.line() == {"done": {"frames": 1, "hits": 1, "errors": 0, "dropped": 0}}
        assert feed.line() is None


# -- another site's page -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1", "null", ""]
)
@pytest.mark.parametrize("path", ["/v1/feeds/door/frames", "/v1/watches/{}/live"])
def test_another_sites_page_opens_no_socket_of_a_server_without_tokens(
    open_kway: Kway, path: str, origin: str
) -> None:
    with open_kway.client() as client:
        path = path.format(watch(client)["id"])
    with open_kway.socket(path, Origin=origin) as socket:
        assert told(socket)[:2] == (4403, "other_origin")
    assert open_kway.feeds.live._followers == 0
    assert not open_kway.board._listeners.listened()


def test_the_servers_own_page_opens_a_socket_and_with_tokens_any_page_that_has_one(
    kway: Kway, open_kway: Kway
) -> None:
    for server, origin in ((open_kway, open_kway.url), (kway, "https://cameras.example")):
        with server.socket("/v1/feeds/door/frames", Origin=origin) as socket:
            socket.send("{")
            heard = json.loads(socket.recv())
            assert (heard["frame"], heard["error"]["code"]) == (0, "invalid_json")
    with pytest.raises(Exception, match="401"):
        kway.socket("/v1/feeds/door/frames", token="c" * 32, Origin=kway.url)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_another_sites_page_may_post_unasked_is_no_feed_and_no_watch(
    open_kway: Kway, kind: str
) -> None:
    """Such kinds a browser sends without asking the server first."""
    with open_kway.client() as client:
        for path in ("/v1/feeds/door", "/v1/watches"):
            answer = client.post(path, content=b"{}", headers={"content-type": kind})
            assert refused(answer)[:2] == (415, "unknown_content_type")


# -- time that is over -------------------------------------------------------------------------


def test_a_watch_whose_time_is_over_ends_its_listeners_with_the_reason(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice, ttl_seconds=1)
    with (
        listening(alice, made["id"]) as lines,
        kway.socket(f"/v1/watches/{made['id']}/live") as socket,
        kway.client() as again,
    ):
        socket.recv()
        send(again, frames(images[:1]))
        for heard in (next(lines), json.loads(socket.recv())):
            assert heard["watch"] == made["id"]
        eventually(lambda: again.get("/v1/watches").json() == {"watches": []})
        assert next(lines) == json.loads(socket.recv()) == {"end": "expired"}
        assert next(lines, None) is None
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1000
    assert refused(alice.get(f"/v1/watches/{made['id']}/hits"))[:2] == (404, "unknown_watch")


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_is_set_ends_no_watch_and_no_listener_and_keeps_none_alive(
    kway: Kway,
    alice: httpx.Client,
    images: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    jump: float,
) -> None:
    long, short = watch(alice), watch(alice, ttl_seconds=0.5)
    with listening(alice, long["id"]) as lines, kway.client() as again:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump)
        eventually(lambda: len(again.get("/v1/watches").json()["watches"]) == 1)
        hits = send(again, frames(images[:1]))
        assert [line.get("watch") for line in hits] == [long["id"], None]
        assert next(lines)["watch"] == long["id"]
    assert refused(alice.get(f"/v1/watches/{short['id']}"))[:2] == (404, "unknown_watch")
