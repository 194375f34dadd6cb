"""Watches and feeds of the client against the real application on a free port."""

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
    RejectedError,
    WatchHit,
    watches,
)
from tests.serving import in_process
from tests.serving.canned import LINES, answering
from tests.serving.in_process import application
from tests.serving.relay import relayed
from tests.tiny_bundle import write_of_texts

pytestmark = pytest.mark.slow

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
    with Client(url, token=ALICE, retry_seconds=20) as client:
        yield client
        for watch in client.watches():
            client.delete_watch(watch.id)


@pytest.fixture
def bob(url: str) -> Iterator[Client]:
    with Client(url, token=BOB, retry_seconds=20) as client:
        yield client


def create(client: Client, **fields: object):
    return client.create_watch(["husky"], **{"ttl_seconds": 60, "threshold": -1e6, **fields})


def test_watches_are_created_listed_renewed_and_deleted(alice: Client, bob: Client) -> None:
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
    ("call", "status", "code"),
    [
        (lambda client: client.create_watch(["husky"], ttl_seconds=60), 422, "invalid_watch"),
        (lambda client: create(client, ttl_seconds=0.1), 422, "invalid_watch"),
        (lambda client: create(client, webhook_url="http://a.b/"), 422, "invalid_watch"),
        (lambda client: create(client, webhook_url="https://a.b/"), 422, "webhook_not_allowed"),
        (lambda client: [create(client) for _ in range(3)], 429, "too_many_watches"),
        (lambda client: client.renew_watch("none/../x"), 404, "no_such_path"),
        (lambda client: client.delete_watch("none"), 404, "unknown_watch"),
        (lambda client: next(client.listen("none")), 404, "unknown_watch"),
        (lambda client: next(client.feed("a b", TEXTS)), 422, "invalid_parameter"),
    ],
)
def test_invalid_requests_are_rejected(
    alice: Client, call: Callable, status: int, code: str
) -> None:
    with pytest.raises(RejectedError) as rejected:
        call(alice)
    assert (rejected.value.status, rejected.value.code) == (status, code)


def test_requests_that_change_watches_are_sent_only_once() -> None:
    for method in ("create_watch", "renew_watch", "delete_watch"):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            received: list[bytes] = []

            def close_connections(
                listener: socket.socket = listener, received: list = received
            ) -> None:
                while len(received) < 2:
                    connection, _ = listener.accept()
                    received.append(connection.recv(65536))
                    connection.close()

            thread = threading.Thread(target=close_connections)
            thread.start()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with Client(url, timeout=5, retry_seconds=5) as client:
                call = {
                    "create_watch": lambda: create(client),
                    "renew_watch": lambda: client.renew_watch("x"),
                    "delete_watch": lambda: client.delete_watch("x"),
                }[method]
                with pytest.raises(OSError, match="may have been made"):
                    call()
            assert len(received) == 1
            socket.create_connection(listener.getsockname()).close()
            thread.join(60)


BUSY = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 0\r\n"
    b'Connection: close\r\n\r\n{"error": {"code": "too_busy", "message": "try again"}}'
)


def test_feeds_and_listeners_are_retried_if_the_server_is_busy() -> None:
    done = {"frames": 0, "hits": 0, "errors": 0, "dropped": 0}
    feed = LINES + json.dumps({"done": done}).encode() + b"\n"
    with answering(BUSY, BUSY, feed) as (url, heads), Client(url) as client:
        assert [one.done.model_dump() for one in client.feed("door", TEXTS)] == [done]
        assert len(heads) == 3
    lines = LINES + b'{"listening": "3f", "cursor": 0}\n{"end": "deleted"}\n'
    with answering(BUSY, BUSY, lines) as (url, heads), Client(url) as client:
        assert list(client.listen("3f")) == [
            Listening(listening="3f", cursor=0),
            Ended(end="deleted"),
        ]
        assert len(heads) == 3


def test_a_feed_yields_the_hits_of_the_clients_own_watches(alice: Client, bob: Client) -> None:
    watch = create(alice, label="line\u2028end")
    sent = [Item("a cat", id="first", time="noon"), "a dog", b"not a text", "hund"]
    *events, done = alice.feed("door", sent)
    hits = [one for one in events if isinstance(one, WatchHit)]
    assert [(one.watch, one.frame, one.time) for one in hits] == [
        (watch.id, "first", "noon"),
        (watch.id, 1, None),
        (watch.id, 3, None),
    ]
    assert {one.label for one in hits} == {"line\u2028end"}
    assert isinstance(events[2], FrameError)
    assert (events[2].frame, events[2].error.code) == (2, "not_a_picture_model")
    assert isinstance(done, FeedDone)
    assert done.done.model_dump() == {"frames": 4, "hits": 3, "errors": 1, "dropped": 0}
    assert [type(one) for one in bob.feed("door", TEXTS[:1])] == [FeedDone]


def test_a_feed_acknowledges_a_frame_before_the_next_is_available(alice: Client) -> None:
    create(alice)
    answered = threading.Event()

    def frames() -> Iterator[str]:
        yield "a cat"
        assert answered.wait(20)

    feed = alice.feed("door", frames(), acknowledge=True)
    assert isinstance(next(feed), WatchHit)
    assert next(feed) == Acknowledged(answered=0, hits=1)
    answered.set()
    assert isinstance(next(feed), FeedDone)


def test_closing_a_feed_frees_its_slot(alice: Client) -> None:
    create(alice)
    feed = alice.feed("door", (text for _ in range(10**9) for text in TEXTS))
    next(feed)
    feed.close()
    time.sleep(0.2)
    assert isinstance(list(alice.feed("door", TEXTS))[-1], FeedDone)


def test_a_listener_receives_hits_in_frames_from_other_clients_until_the_watch_ends(
    alice: Client, bob: Client
) -> None:
    watch = create(alice)
    events = alice.listen(watch.id)
    assert next(events) == Listening(listening=watch.id, cursor=0)
    assert isinstance(list(bob.feed("door", TEXTS))[-1], FeedDone)
    assert {one.frame for one in islice(events, 4)} == {0, 1, 2, 3}
    alice.delete_watch(watch.id)
    assert list(events) == [Ended(end="deleted")]


def test_a_listener_misses_no_hit_when_it_reconnects(
    url: str, alice: Client, bob: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "_RECONNECT_SECONDS", 0.1)
    watch = create(alice)
    with relayed(url) as relay, Client(relay.url, token=ALICE, retry_seconds=30) as client:
        events = client.listen(watch.id)
        assert isinstance(next(events), Listening)
        for texts in (TEXTS, TEXTS[:2]):
            relay.cut()
            list(bob.feed("door", texts))
            assert isinstance(next(events), Listening)
            assert [one.frame for one in islice(events, len(texts))] == [*range(len(texts))]
        assert relay.connections >= 3
        relay.cut()
        alice.delete_watch(watch.id)
        with pytest.raises(RejectedError, match="watch"):  # it was deleted in the meantime
            list(events)


def test_a_feed_and_a_listener_resume_where_an_earlier_client_ended(
    alice: Client, bob: Client
) -> None:
    watch = create(alice)
    assert bob.feed_position("yard") is None
    list(bob.feed("yard", [Item(text, id=f"f{index}") for index, text in enumerate(TEXTS)]))
    assert bob.feed_position("yard") == "f3"
    events = alice.listen(watch.id, after=2)
    assert next(events) == Listening(listening=watch.id, cursor=2)
    assert [(one.frame, one.cursor) for one in islice(events, 2)] == [("f2", 3), ("f3", 4)]
    events.close()


def test_closing_a_listener_frees_its_slot(alice: Client) -> None:
    watch = create(alice)
    for _ in range(2):
        events = alice.listen(watch.id)
        assert isinstance(next(events), Listening)
        events.close()
        time.sleep(0.2)
