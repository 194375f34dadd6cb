"""Stored hits over HTTP and WebSockets: ids, cursors, positions of feeds and failing storage."""

import json
import threading
from collections.abc import Iterator, Mapping

import httpx
import pytest

from serving.watches.storage import MemoryStorage
from serving.watches.watch import WatchesDownError
from tests.serving.watching import (
    BOB,
    Kway,
    alice,
    create_watch,
    feeding,
    frames,
    images,
    listening,
    running,
    send_frames,
)

pytestmark = pytest.mark.slow

__all__ = ["alice", "images"]  # fixtures


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    with running(tmp_path_factory.mktemp("durable"), request_timeout_seconds=1) as opened:
        yield opened


class SlowStorage(MemoryStorage):
    """Waits for `gate`, and raises an error while `is_full` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_full = threading.Event(), False
        self.gate.set()

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        self.gate.wait(20)
        if self.is_full:
            raise WatchesDownError("no space left on device")
        super().apply(changes)


@pytest.fixture
def storage(kway: Kway, monkeypatch: pytest.MonkeyPatch) -> SlowStorage:
    found = SlowStorage()
    monkeypatch.setattr(kway.board._log, "_storage", found)
    return found


def test_hits_in_frames_without_a_listener_are_stored_and_read_from_a_cursor(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice)
    path = f"/v1/watches/{made['id']}"
    with kway.client(BOB) as bob:
        send_frames(bob, frames(images[:3]))
    own = send_frames(alice, frames(images[3:5]))[:-1]
    assert [hit["cursor"] for hit in own] == [4, 5]
    with listening(alice, made["id"], after=0) as lines:
        found = [next(lines) for _ in range(5)]
        assert [hit["cursor"] for hit in found] == [1, 2, 3, 4, 5]
        assert found[3:] == own
    for after in range(5):
        with kway.socket(f"{path}/live?after={after}") as socket:
            assert json.loads(socket.recv()) == {"listening": made["id"], "cursor": after}
            assert [json.loads(socket.recv()) for _ in found[after:]] == found[after:]
    with kway.socket(f"{path}/live") as socket:
        assert json.loads(socket.recv()) == {"listening": made["id"], "cursor": 5}
        send_frames(alice, frames(images[:1]))
        assert json.loads(socket.recv())["cursor"] == 6


@pytest.mark.parametrize("after", ["-1", "x", "1", "9" * 30])
def test_an_invalid_cursor_is_rejected(kway: Kway, alice: httpx.Client, after: str) -> None:
    path = f"/v1/watches/{create_watch(alice)['id']}"
    response = alice.get(f"{path}/hits", params={"after": after})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_parameter")
    with kway.socket(f"{path}/live?after={after}") as socket:
        assert json.loads(socket.recv())["error"]["code"] == "invalid_parameter"


def test_a_frame_sent_twice_has_hits_with_the_same_ids(
    alice: httpx.Client, images: list[bytes]
) -> None:
    create_watch(alice, classes=["husky", "samoyed"])
    create_watch(alice)

    def ids(image: bytes, feed: str = "door", **fields: object) -> list[str]:
        lines = send_frames(alice, frames([image], **fields), feed)
        return sorted(line["id"] for line in lines[:-1])

    first = ids(images[0], id="a")
    assert len(set(first)) == 3
    assert ids(images[0], id="a") == first
    others = (
        ids(images[1], id="a"),
        ids(images[0], id="b"),
        ids(images[0], id="a", time=1),
        ids(images[0], "gate", id="a"),
    )
    for other in others:
        assert not set(first) & set(other)


def test_a_frame_is_not_answered_before_its_hits_are_stored(
    kway: Kway, alice: httpx.Client, images: list[bytes], storage: SlowStorage
) -> None:
    made = create_watch(alice)
    with feeding(kway.url, "/v1/feeds/door?acknowledge=true") as feed:
        feed.send(frames(images[:1]))
        assert feed.line() is not None
        assert feed.line() == {"answered": 0, "hits": 1}
        storage.gate.clear()
        feed.send(frames(images[1:2]))
        threading.Timer(0.5, storage.gate.set).start()
        hit = feed.line()
        assert storage.gate.is_set()
        assert hit is not None
        assert [key for key in storage if key.endswith(f"/{made['id']}/2")]
        assert json.loads(storage[max(key for key in storage if key.startswith("hit/"))]) == hit


def test_the_position_of_a_feed_is_its_last_answered_frame(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    path = "/v1/feeds/resumed"
    assert alice.get(path).json() == {"feed": "resumed", "frame": None}
    send_frames(alice, frames(images[:2], id="a") + b"{\n" + frames(images[:1], id="b"), "resumed")
    assert alice.get(path).json() == {"feed": "resumed", "frame": "b"}
    with kway.client(BOB) as bob:
        assert bob.get(path).json()["frame"] is None
        assert bob.get("/v1/feeds/-").status_code == 422


def test_a_frame_whose_hits_cannot_be_stored_is_an_error_and_can_be_sent_again(
    kway: Kway, alice: httpx.Client, images: list[bytes], storage: SlowStorage
) -> None:
    create_watch(alice)
    with feeding(kway.url, "/v1/feeds/full") as feed:
        storage.is_full = True
        feed.send(frames(images[:1], id="a"))
        line = feed.line()
        assert line is not None
        assert (line["frame"], line["error"]["code"]) == ("a", "watches_down")
        assert "no space left on device" in line["error"]["message"]
        storage.is_full = False
        feed.send(frames(images[1:2], id="b"))
        line = feed.line()
        assert line is not None
        assert line["frame"] == "b"
        feed.finish()
        assert feed.line() is not None
        assert alice.get("/v1/feeds/full").json()["frame"] is None  # "a" must be sent again
    with feeding(kway.url, "/v1/feeds/full") as feed:
        feed.send(frames(images[:1], id="a") + frames(images[1:2], id="b"))
        feed.finish()
        assert feed.response.read().count(b'"cursor"') == 2
    assert alice.get("/v1/feeds/full").json()["frame"] == "b"
