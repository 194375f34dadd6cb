"""The client's standing queries, against the real application on a real port."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from serving.client import (
    Acknowledged,
    Client,
    Ended,
    FeedDone,
    FrameError,
    Item,
    Listening,
    RefusedError,
    WatchHit,
    watches,
)
from tests.serving import in_process
from tests.serving.canned import LINES, answering
from tests.serving.in_process import application
from tests.serving.relay import relayed
from tests.tiny_bundle import write_of_texts

ALICE, BOB = "a" * 32, "b" * 32
TEXTS = ["a cat", "a dog", "hund", "猫"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("watches")
    tokens = folder / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{ALICE}\n{BOB}\n")
    api = application(
        write_of_texts(folder / "texts"),
        token_file=tokens,
        max_watches_per_client=2,
        max_watch_listeners=1,
        min_watch_ttl_seconds=0.2,
        max_feeds=1,
    )
    with in_process.listening(api) as url:
        yield url


@pytest.fixture
def alice(url: str) -> Iterator[Client]:
    with Client(url, token=ALICE, patience=20) as client:
        yield client
        for watch in client.watches():
            client.delete_watch(watch.id)


@pytest.fixture
def bob(url: str) -> Iterator[Client]:
    with Client(url, token=BOB, patience=20) as client:
        yield client


def made(client: Client, **fields: object):
    return client.create_watch(["husky"], **{"ttl_seconds": 60, "threshold": -1e6, **fields})


def eventually(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_watch_is_made_listed_renewed_and_deleted(alice: Client, bob: Client) -> None:
    watch = alice.create_watch(
        ["husky", 3], ttl_seconds=60, recall=0.9, feeds=["door"], label="dogs\u2028"
    )
    assert [one.class_id for one in watch.classes] == [0, 3]
    assert (watch.recall, watch.feeds, watch.label) == (0.9, ["door"], "dogs\u2028")
    assert alice.watches() == [watch]
    assert bob.watches() == []
    renewed = alice.renew_watch(watch.id, ttl_seconds=100)
    assert renewed.ttl_seconds == 100
    assert alice.renew_watch(watch.id).expires_at > watch.expires_at
    alice.delete_watch(watch.id)
    assert alice.watches() == []


@pytest.mark.parametrize(
    ("ask", "status", "code"),
    [
        (lambda client: client.create_watch(["husky"], ttl_seconds=60), 422, "invalid_watch"),
        (lambda client: made(client, ttl_seconds=0.1), 422, "invalid_watch"),
        (lambda client: [made(client) for _ in range(3)], 429, "too_many_watches"),
        (lambda client: client.renew_watch("none/../x"), 404, "no_such_path"),
        (lambda client: client.delete_watch("none"), 404, "unknown_watch"),
        (lambda client: next(client.listen("none")), 404, "unknown_watch"),
        (lambda client: next(client.feed("a b", TEXTS)), 422, "invalid_parameter"),
    ],
)
def test_what_cannot_be_is_refused(alice: Client, ask: Callable, status: int, code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        ask(alice)
    assert (refused.value.status, refused.value.code) == (status, code)


def test_what_changes_something_is_sent_once() -> None:
    for method in ("create_watch", "renew_watch", "delete_watch"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            asked: list[bytes] = []

            def hang_up(listener: socket.socket = listener, asked: list = asked) -> None:
                while len(asked) < 2:
                    connection, _ = listener.accept()
                    asked.append(connection.recv(65536))
                    connection.close()

            thread = threading.Thread(target=hang_up)
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with Client(url, timeout=5, patience=5) as client:
                ask = {
                    "create_watch": lambda: made(client),
                    "renew_watch": lambda: client.renew_watch("x"),
                    "delete_watch": lambda: client.delete_watch("x"),
                }[method]
                with pytest.raises(OSError, match="may have been done"):
                    ask()
            assert len(asked) == 1
            socket.create_connection(listener.getsockname()).close()
            thread.join()


BUSY = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 0\r\n"
    b'Connection: close\r\n\r\n{"error": {"code": "too_busy", "message": "try again"}}'
)


def test_a_feed_and_a_listener_that_found_no_place_come_again() -> None:
    done = {"frames": 0, "hits": 0, "errors": 0, "dropped": 0}
    feed = LINES + json.dumps({"done": done}).encode() + b"\n"
    with answering(BUSY, BUSY, feed) as (url, heads), Client(url) as client:
        assert [one.done.model_dump() for one in client.feed("door", TEXTS)] == [done]
        assert len(heads) == 3
    heard = LINES + b'{"listening": "3f"}\n{"end": "deleted"}\n'
    with answering(BUSY, BUSY, heard) as (url, heads), Client(url) as client:
        assert list(client.listen("3f")) == [Listening(listening="3f"), Ended(end="deleted")]
        assert len(heads) == 3


def test_a_feed_brings_the_hits_of_ones_own_watches(alice: Client, bob: Client) -> None:
    watch = made(alice, label="line\u2028end")
    sent = [Item("a cat", id="first", time="noon"), "a dog", b"no text", "hund"]
    *said, done = alice.feed("door", sent)
    hits = [one for one in said if isinstance(one, WatchHit)]
    assert [(one.watch, one.frame, one.time) for one in hits] == [
        (watch.id, "first", "noon"),
        (watch.id, 1, None),
        (watch.id, 3, None),
    ]
    assert {one.label for one in hits} == {"line\u2028end"}
    assert isinstance(said[2], FrameError)
    assert (said[2].frame, said[2].error.code) == (2, "not_a_picture_model")
    assert isinstance(done, FeedDone)
    assert done.done.model_dump() == {"frames": 4, "hits": 3, "errors": 1, "dropped": 0}
    assert [type(one) for one in bob.feed("door", TEXTS[:1])] == [FeedDone]


def test_a_feed_acknowledges_frames_before_the_next_is_there(alice: Client) -> None:
    made(alice)
    answered = threading.Event()

    def frames() -> Iterator[str]:
        yield "a cat"
        assert answered.wait(20)

    feed = alice.feed("door", frames(), acknowledge=True)
    assert isinstance(next(feed), WatchHit)
    assert next(feed) == Acknowledged(answered=0, hits=1)
    answered.set()
    assert isinstance(next(feed), FeedDone)


def test_a_feed_closed_early_gives_its_place_back(alice: Client) -> None:
    made(alice)
    feed = alice.feed("door", (text for _ in range(10**9) for text in TEXTS))
    next(feed)
    feed.close()
    time.sleep(0.2)
    assert isinstance(list(alice.feed("door", TEXTS))[-1], FeedDone)


def test_a_listener_hears_hits_of_others_feeds_until_the_watch_ends(
    alice: Client, bob: Client
) -> None:
    watch = made(alice)
    heard = alice.listen(watch.id)
    assert next(heard) == Listening(listening=watch.id)
    assert isinstance(list(bob.feed("door", TEXTS))[-1], FeedDone)
    assert {one.frame for one in islice(heard, 4)} == {0, 1, 2, 3}
    alice.delete_watch(watch.id)
    assert list(heard) == [Ended(end="deleted")]


def test_a_listener_that_lost_its_connection_says_that_it_listens_anew(
    url: str, alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "_RELISTEN_SECONDS", 0.1)
    watch = made(alice)
    with relayed(url) as relay, Client(relay.url, token=ALICE, patience=30) as client:
        heard = client.listen(watch.id)
        assert isinstance(next(heard), Listening)
        relay.cut()
        assert next(heard) == Listening(listening=watch.id)
        assert relay.connections >= 2
        list(bob.feed("door", TEXTS[:1]))
        assert isinstance(next(heard), WatchHit)
        relay.cut()
        alice.delete_watch(watch.id)
        with pytest.raises(RefusedError, match="watch"):  # it ended meanwhile
            list(heard)


def test_a_listener_closed_early_gives_its_place_back(alice: Client) -> None:
    watch = made(alice)
    for _ in range(2):
        heard = alice.listen(watch.id)
        assert isinstance(next(heard), Listening)
        heard.close()
        time.sleep(0.2)
