"""Standing queries: the routes and the service are real and listen on a port; Ray is not there."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from serving.watches import listeners
from serving.watches.schemas import WatchChanges
from tests.serving.watching import (
    BOB,
    NDJSON,
    Kway,
    alice,
    encoded,
    eventually,
    frames,
    images,
    listening,
    running,
    send,
    watch,
)
from tests.tiny_bundle import WAYS_TO_ASK

__all__ = ["alice", "images"]  # fixtures
MOST, FRAME_BYTES, JSON = 4, 20_000, "application/json"


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    limits = {
        "max_watches": 6,
        "max_watches_per_client": MOST,
        "max_watch_listeners": 2,
        "min_watch_ttl_seconds": 0.2,
        "max_watch_ttl_seconds": 100,
        "max_frame_bytes": FRAME_BYTES,
        "max_feeds": 3,
        "feed_idle_seconds": 20,
    }
    with running(tmp_path_factory.mktemp("watches"), **limits) as opened:
        yield opened


def test_hits_are_what_a_query_decides(alice: httpx.Client, images: list[bytes]) -> None:
    asked = {"classes": list(WAYS_TO_ASK), "images": [encoded(image) for image in images]}
    scores = [
        verdict["score"]
        for result in alice.post("/v1/query", json=asked).json()["results"]
        for verdict in result["verdicts"]
    ]
    questions = [
        {"classes": ["husky", "samoyed"], "recall": 0.9},
        {"classes": list(WAYS_TO_ASK), "threshold": float(np.median(scores))},
    ]
    made = [watch(alice, **{"threshold": None, **question}) for question in questions]
    lines = send(alice, frames(images))
    total = 0
    for one, question in zip(made, questions, strict=True):
        found = alice.post("/v1/query", json={**question, "images": asked["images"]}).json()
        wanted = [
            (result["input"], *(verdict[key] for key in ("class", "class_id", "threshold")))
            for result in found["results"]
            for verdict in result["verdicts"]
            if verdict["match"]
        ]
        wanted_scores = [
            verdict["score"]
            for result in found["results"]
            for verdict in result["verdicts"]
            if verdict["match"]
        ]
        hits = [line for line in lines if line.get("watch") == one["id"]]
        keys = ("frame", "class", "class_id", "threshold")
        assert [tuple(hit[key] for key in keys) for hit in hits] == wanted
        assert [hit["score"] for hit in hits] == pytest.approx(wanted_scores, rel=1e-5, abs=1e-6)
        total += len(wanted)
    assert 0 < total < len(scores) * 2
    counts = {"frames": len(images), "hits": total, "errors": 0, "dropped": 0}
    assert lines[-1] == {"done": counts}


def test_many_watches_cost_one_forward_pass_and_one_product_a_frame(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = [watch(alice, classes=list(WAYS_TO_ASK[: place + 1])) for place in range(MOST)]
    forwards, products = kway.model.forwards, kway.model.products
    with kway.socket("/v1/feeds/door/frames?acknowledge=true") as socket:
        for place, image in enumerate(images):
            socket.send(image)
            hits = [json.loads(socket.recv()) for _ in range(1 + 2 + 3 + 4)]
            assert {hit["watch"] for hit in hits} == {one["id"] for one in made}
            assert json.loads(socket.recv()) == {"answered": place, "hits": 10}
    assert kway.model.forwards - forwards == len(images)
    assert kway.model.products - products == len(images)


def test_a_frame_that_no_watch_looks_at_costs_no_forward_pass(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    watch(alice, feeds=["gate"])
    forwards = kway.model.forwards
    assert [*send(alice, frames(images))[-1]["done"].values()] == [6, 0, 0, 0]
    assert kway.model.forwards == forwards
    assert send(alice, frames(images), "gate")[-1]["done"]["hits"] == 6


def test_a_watch_is_described_changed_renewed_and_deleted(alice: httpx.Client) -> None:
    made = watch(alice, classes=["samoyed", 2, "husky"], recall=0.9, threshold=None, label="dogs")
    assert [one["class"] for one in made["classes"]] == ["samoyed", "husky"]
    assert [one["threshold"] for one in made["classes"]] == [2.0, 0.0]
    where = f"/v1/watches/{made['id']}"
    assert alice.get(where).json() == made
    renewed = alice.patch(where, json={}).json()
    assert renewed.pop("expires_at") > made["expires_at"]
    assert renewed == {key: value for key, value in made.items() if key != "expires_at"}
    changed = alice.patch(where, json={"threshold": 1.5, "feeds": ["door"], "label": None}).json()
    assert (changed["recall"], changed["threshold"], changed["feeds"]) == (None, 1.5, ["door"])
    assert {one["threshold"] for one in changed["classes"]} == {1.5}
    assert alice.delete(where).status_code == 204
    assert alice.get(where).json()["error"]["code"] == "unknown_watch"
    assert alice.get("/v1/watches").json() == {"watches": []}


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"threshold": None}, 422, "invalid_watch"),
        ({"recall": 0.9}, 422, "invalid_query"),
        ({"recall": 0.5, "threshold": None}, 422, "invalid_query"),
        ({"classes": ["7"], "recall": 0.99, "threshold": None}, 422, "no_threshold"),
        ({"classes": ["hsky"]}, 404, "unknown_class"),
        ({"classes": ["husky"] * 101}, 413, "too_many_classes"),
        ({"classes": []}, 422, "invalid_watch"),
        ({"ttl_seconds": 101}, 422, "invalid_watch"),
        ({"ttl_seconds": 0.1}, 422, "invalid_watch"),
        ({"feeds": ["../x"]}, 422, "invalid_watch"),
        ({"client": "x"}, 422, "invalid_watch"),
    ],
)
def test_what_is_no_watch_is_refused_with_a_reason(
    alice: httpx.Client, fields: dict, status: int, code: str
) -> None:
    body = {"classes": ["husky"], "threshold": 0, "ttl_seconds": 60, **fields}
    answer = alice.post("/v1/watches", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert alice.get("/v1/watches").json() == {"watches": []}


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_long_body_of_a_watch_is_read_away_from_the_event_loop(
    alice: httpx.Client, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/watches" + (f"/{watch(alice)['id']}" if method == "PATCH" else "")
    threads, validate = [], WatchChanges.model_validate.__func__

    def seen(model: type[WatchChanges], found: object) -> WatchChanges:
        threads.append(threading.current_thread().name)
        return validate(model, found)

    monkeypatch.setattr(WatchChanges, "model_validate", classmethod(seen))
    body = b'{"classes": ["husky"], "threshold": 0, "ttl_seconds": 60}' + b" " * 200_000
    answer = alice.request(method, path, content=body, headers={"content-type": JSON})
    assert answer.is_success, answer.text
    assert [name.startswith("prepare") for name in threads] == [True]


@pytest.mark.parametrize("seconds", [0.2, 100])
def test_the_least_and_the_longest_time_may_be_asked_for(
    alice: httpx.Client, seconds: float
) -> None:
    assert watch(alice, ttl_seconds=seconds)["ttl_seconds"] == seconds


def test_another_clients_watch_is_invisible_and_its_hits_are(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice)
    where = f"/v1/watches/{made['id']}"
    with kway.client(BOB) as bob:
        assert bob.get("/v1/watches").json() == {"watches": []}
        for answer in (
            bob.get(where),
            bob.patch(where, json={}),
            bob.delete(where),
            bob.get(f"{where}/hits"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_watch")
        assert send(bob, frames(images))[-1]["done"]["hits"] == 0
    assert alice.get(where).json() == made


def test_a_listener_hears_hits_of_frames_that_others_send(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice, label="dogs")
    with (
        listening(alice, made["id"]) as lines,
        kway.socket(f"/v1/watches/{made['id']}/live") as socket,
        kway.client(BOB) as bob,
    ):
        assert json.loads(socket.recv()) == {"listening": made["id"]}
        answer = alice.get(f"/v1/watches/{made['id']}/hits")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_listeners")
        own = send(bob, frames(images[:3], id="x", time=7.5))
        assert own == [{"done": {"frames": 3, "hits": 0, "errors": 0, "dropped": 0}}]
        for heard in (
            [next(lines) for _ in range(3)],
            [json.loads(socket.recv()) for _ in range(3)],
        ):
            assert {(hit["frame"], hit["time"], hit["label"]) for hit in heard} == {
                ("x", 7.5, "dogs")
            }
        alice_again = kway.client()
        with alice_again:
            alice_again.delete(f"/v1/watches/{made['id']}")
        assert next(lines) == {"end": "deleted"}
        assert json.loads(socket.recv()) == {"end": "deleted"}
        assert next(lines, None) is None


def test_a_disconnect_frees_its_listener_and_its_feed(
    kway: Kway, alice: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "WAIT_SECONDS", 1000.0)  # no sign of life finds it
    made = watch(alice)
    with listening(alice, made["id"]), kway.socket(f"/v1/watches/{made['id']}/live") as socket:
        socket.recv()
        with kway.socket("/v1/feeds/door/frames"):
            eventually(lambda: kway.feeds.live._followers == 1)
        assert len(kway.board._listeners.of(made["id"])) == 2
    eventually(lambda: not kway.board._listeners.of(made["id"]))
    eventually(lambda: kway.feeds.live._task is None)


def test_garbage_frames_are_answered_and_the_feed_goes_on(
    alice: httpx.Client, images: list[bytes]
) -> None:
    watch(alice)
    good = frames(images[:1])
    wrong = [
        b"{\n",
        b"\xff\n",
        b'{"image": "AAAA", "id": "dark"}\n',
        b'{"image": "*", "id": 7}\n',
        b'{"text": "a"}\n',
        b'{"image": "http://x/y.png"}\n',
        b"[]\n",
        b'{"image": "' + b"A" * (2 * FRAME_BYTES) + b'"}\n',
        json.dumps({"image": encoded(bytes(FRAME_BYTES + 1))}).encode() + b"\n",
    ]
    lines = send(alice, good + b"\n" + b"".join(wrong) + good)
    assert lines[0]["frame"] == 0
    found = [(line["frame"], line["error"]["code"]) for line in lines[1:-2]]
    assert found == [
        (1, "invalid_json"),
        (2, "invalid_json"),
        ("dark", "not_a_picture"),
        (7, "invalid_base64"),
        (5, "not_a_text_model"),
        (6, "urls_refused"),
        (7, "invalid_frame"),
        (8, "frame_too_long"),
        (9, "frame_too_long"),
    ]
    assert not lines[3]["error"]["message"].startswith("frame[")
    assert (lines[-2]["frame"], lines[-1]["done"]["errors"]) == (10, 9)


def test_a_frames_own_id_comes_back_even_if_it_is_zero_or_empty(
    alice: httpx.Client, images: list[bytes]
) -> None:
    watch(alice)
    sent = [frames(images[:1], **said) for said in ({}, {"id": 0}, {"id": ""}, {})]
    assert [line["frame"] for line in send(alice, b"".join(sent))[:-1]] == [0, 0, "", 3]


def test_a_socket_answers_garbage_in_the_same_way(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = watch(alice)
    with kway.socket("/v1/feeds/door/frames") as socket:
        for message in (b"x", "{", bytes(FRAME_BYTES + 1), "", json.dumps({"text": "a"})):
            socket.send(message)
        codes = [json.loads(socket.recv())["error"]["code"] for _ in range(4)]
        assert codes == ["not_a_picture", "invalid_json", "frame_too_long", "not_a_text_model"]
        socket.send(images[0])
        assert (json.loads(socket.recv())["watch"]) == made["id"]


@pytest.mark.parametrize(
    ("path", "close", "code"),
    [
        ("/v1/watches/nothing/live", 4404, "unknown_watch"),
        ("/v1/feeds/-/frames", 4422, "invalid_parameter"),
        ("/v1/feeds/door/frames?lates=1", 4422, "invalid_parameter"),
    ],
)
def test_a_socket_is_told_why_it_is_closed(kway: Kway, path: str, close: int, code: str) -> None:
    with kway.socket(path) as socket:
        assert json.loads(socket.recv())["error"]["code"] == code
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == close


def test_a_live_feed_drops_overtaken_frames_and_says_so(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    watch(alice)
    with kway.socket("/v1/feeds/door/frames?latest=true") as socket:
        before, begun = kway.counts.frames.count("dropped"), kway.model.begun
        kway.model.gate.clear()
        try:
            socket.send(images[0])
            eventually(lambda: kway.model.begun > begun)
            for image in images[1:5]:
                socket.send(image)
            time.sleep(0.5)  # they arrive
        finally:
            kway.model.gate.set()
        lines = [json.loads(socket.recv())]
        while lines[-1].get("frame") != 4:
            lines.append(json.loads(socket.recv()))
    dropped = sum(line.get("dropped", 0) for line in lines)
    assert lines[0]["frame"] == 0
    assert dropped >= 1
    assert dropped + sum("frame" in line for line in lines) == 5
    assert kway.counts.frames.count("dropped") - before == dropped


def test_limits_of_watches_and_feeds_hold(kway: Kway, alice: httpx.Client) -> None:
    body = {"classes": ["husky"], "threshold": 0, "ttl_seconds": 60}
    with kway.client(BOB) as bob:
        made = [client.post("/v1/watches", json=body) for client in [alice] * 5 + [bob] * 3]
    assert [one.status_code for one in made] == [201] * 4 + [429] + [201] * 2 + [429]
    assert made[4].json()["error"]["message"].startswith("you have 4 watches, at most 4")
    with ExitStack() as sockets:
        for feed in "abc":
            sockets.enter_context(kway.socket(f"/v1/feeds/{feed}/frames"))
        eventually(lambda: kway.feeds.live._followers == 3)
        answer = alice.post("/v1/feeds/d", content=b"", headers=NDJSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_feeds")
