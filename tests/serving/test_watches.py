"""Watches, feeds and listeners over HTTP and WebSockets: the real application, without Ray."""

import gc
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from serving.answer import Query, threshold_of
from serving.schemas import ClassThreshold
from serving.watches import listeners, matching
from serving.watches.schemas import WatchChanges
from tests.serving.watching import (
    BOB,
    NDJSON,
    Kway,
    alice,
    create_watch,
    encoded,
    eventually,
    feeding,
    frames,
    images,
    listening,
    running,
    send_frames,
)
from tests.tiny_bundle import WAYS_TO_ASK
from trainer.bundle.bundle import Bundle

__all__ = ["alice", "images"]  # fixtures
MAX_WATCHES, FRAME_BYTES, JSON = 4, 20_000, "application/json"


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    limits = {
        "max_watches": 6,
        "max_watches_per_client": MAX_WATCHES,
        "max_watch_listeners": 2,
        "min_watch_ttl_seconds": 0.2,
        "max_watch_ttl_seconds": 100,
        "max_frame_bytes": FRAME_BYTES,
        "max_feeds": 3,
        "feed_idle_seconds": 20,
    }
    with running(tmp_path_factory.mktemp("watches"), **limits) as opened:
        yield opened


def test_hits_equal_the_matches_of_queries(alice: httpx.Client, images: list[bytes]) -> None:
    body = {"classes": list(WAYS_TO_ASK), "images": [encoded(image) for image in images]}
    scores = [
        verdict["score"]
        for result in alice.post("/v1/query", json=body).json()["results"]
        for verdict in result["verdicts"]
    ]
    queries = [
        {"classes": ["husky", "samoyed"], "recall": 0.9},
        {"classes": list(WAYS_TO_ASK), "threshold": float(np.median(scores))},
    ]
    made = [create_watch(alice, **{"threshold": None, **query}) for query in queries]
    lines = send_frames(alice, frames(images))
    total = 0
    for one, query in zip(made, queries, strict=True):
        answer = alice.post("/v1/query", json={**query, "images": body["images"]}).json()
        expected = [
            (result["input"], *(verdict[key] for key in ("class", "class_id", "threshold")))
            for result in answer["results"]
            for verdict in result["verdicts"]
            if verdict["match"]
        ]
        expected_scores = [
            verdict["score"]
            for result in answer["results"]
            for verdict in result["verdicts"]
            if verdict["match"]
        ]
        hits = [line for line in lines if line.get("watch") == one["id"]]
        keys = ("frame", "class", "class_id", "threshold")
        assert [tuple(hit[key] for key in keys) for hit in hits] == expected
        assert [hit["score"] for hit in hits] == pytest.approx(expected_scores, rel=1e-5, abs=1e-6)
        total += len(expected)
    assert 0 < total < len(scores) * 2
    counts = {"frames": len(images), "hits": total, "errors": 0, "dropped": 0}
    assert lines[-1] == {"done": counts}


def test_many_watches_need_one_forward_pass_and_one_product_per_frame(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = [
        create_watch(alice, classes=list(WAYS_TO_ASK[: index + 1])) for index in range(MAX_WATCHES)
    ]
    forwards, products = kway.model.forwards, kway.model.products
    with kway.socket("/v1/feeds/door/frames?acknowledge=true") as socket:
        for index, image in enumerate(images):
            socket.send(image)
            hits = [json.loads(socket.recv()) for _ in range(1 + 2 + 3 + 4)]
            assert {hit["watch"] for hit in hits} == {one["id"] for one in made}
            assert json.loads(socket.recv()) == {"answered": index, "hits": 10}
    assert kway.model.forwards - forwards == len(images)
    assert kway.model.products - products == len(images)


def plans_of(kway: Kway) -> Any:
    """Return the plans of the only version of the model."""
    (plans,) = kway.feeds._plans.values()
    return plans


def test_connections_share_the_thresholds_of_the_watches(
    kway: Kway, alice: httpx.Client, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(bundle: Bundle, class_id: int, query: Query) -> ClassThreshold:
        computed.append(class_id)
        return threshold_of(bundle, class_id, query)

    monkeypatch.setattr(matching, "threshold_of", counted)
    for _ in range(2):
        create_watch(alice, classes=["husky", "samoyed"], recall=0.9, threshold=None)
    with (
        feeding(kway.url, "/v1/feeds/door") as first,
        feeding(kway.url, "/v1/feeds/door") as second,
    ):
        plans = []
        for feed in (first, second):
            feed.send(frames(images[:1]) + b"{\n")
            while (line := feed.line()) is not None and "error" not in line:
                pass
            plans.append(plans_of(kway).by_feed["door"])
        assert plans[0] is plans[1]
        plans.clear()
        send_frames(alice, frames(images), "gate")
        for feed in (first, second):
            feed.finish()
            assert feed.response.read()
    assert len(computed) == 2

    def is_forgotten() -> bool:
        gc.collect()
        return "door" not in plans_of(kway).by_feed

    eventually(is_forgotten)


def test_criteria_of_removed_watches_are_forgotten(
    kway: Kway, alice: httpx.Client, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_SPARE_ENTRIES", 2)
    for _ in range(10):
        made = create_watch(alice)
        send_frames(alice, frames(images[:1]))
        alice.delete(f"/v1/watches/{made['id']}")
    assert len(plans_of(kway)._criteria._cache) <= 5


def test_a_frame_that_no_watch_selects_needs_no_forward_pass(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    create_watch(alice, feeds=["gate"])
    forwards = kway.model.forwards
    assert [*send_frames(alice, frames(images))[-1]["done"].values()] == [6, 0, 0, 0]
    assert kway.model.forwards == forwards
    assert send_frames(alice, frames(images), "gate")[-1]["done"]["hits"] == 6


def test_a_watch_can_be_read_changed_renewed_and_deleted(alice: httpx.Client) -> None:
    made = create_watch(
        alice, classes=["samoyed", 2, "husky"], recall=0.9, threshold=None, label="dogs"
    )
    assert [one["class"] for one in made["classes"]] == ["samoyed", "husky"]
    assert [one["threshold"] for one in made["classes"]] == [2.0, 0.0]
    path = f"/v1/watches/{made['id']}"
    assert alice.get(path).json() == made
    renewed = alice.patch(path, json={}).json()
    assert renewed.pop("expires_at") > made["expires_at"]
    assert renewed == {key: value for key, value in made.items() if key != "expires_at"}
    changed = alice.patch(path, json={"threshold": 1.5, "feeds": ["door"], "label": None}).json()
    assert (changed["recall"], changed["threshold"], changed["feeds"]) == (None, 1.5, ["door"])
    assert {one["threshold"] for one in changed["classes"]} == {1.5}
    assert alice.delete(path).status_code == 204
    assert alice.get(path).json()["error"]["code"] == "unknown_watch"
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
def test_invalid_watches_are_rejected_with_an_error_code(
    alice: httpx.Client, fields: dict, status: int, code: str
) -> None:
    body = {"classes": ["husky"], "threshold": 0, "ttl_seconds": 60, **fields}
    response = alice.post("/v1/watches", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert alice.get("/v1/watches").json() == {"watches": []}


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_long_body_is_parsed_outside_the_event_loop(
    alice: httpx.Client, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/v1/watches" + (f"/{create_watch(alice)['id']}" if method == "PATCH" else "")
    threads, validate = [], WatchChanges.model_validate.__func__

    def recorded(model: type[WatchChanges], value: object) -> WatchChanges:
        threads.append(threading.current_thread().name)
        return validate(model, value)

    monkeypatch.setattr(WatchChanges, "model_validate", classmethod(recorded))
    classes = ", ".join([r'"\u0068\u0075\u0073\u006b\u0079"'] * 60)
    body = b'{"classes": [%s], "threshold": 0, "ttl_seconds": 60}' % classes.encode()
    body += b" " * 20_000
    response = alice.request(method, path, content=body, headers={"content-type": JSON})
    assert response.is_success, response.text
    assert [name.startswith("prepare") for name in threads] == [True]


@pytest.mark.parametrize("seconds", [0.2, 100])
def test_the_shortest_and_longest_time_to_live_are_accepted(
    alice: httpx.Client, seconds: float
) -> None:
    assert create_watch(alice, ttl_seconds=seconds)["ttl_seconds"] == seconds


def test_watches_and_hits_of_other_clients_are_invisible(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice)
    path = f"/v1/watches/{made['id']}"
    with kway.client(BOB) as bob:
        assert bob.get("/v1/watches").json() == {"watches": []}
        for response in (
            bob.get(path),
            bob.patch(path, json={}),
            bob.delete(path),
            bob.get(f"{path}/hits"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (
                404,
                "unknown_watch",
            )
        assert send_frames(bob, frames(images))[-1]["done"]["hits"] == 0
    assert alice.get(path).json() == made


def test_a_listener_receives_hits_in_frames_from_other_clients(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice, label="dogs")
    with (
        listening(alice, made["id"]) as lines,
        kway.socket(f"/v1/watches/{made['id']}/live") as socket,
        kway.client(BOB) as bob,
    ):
        assert json.loads(socket.recv())["listening"] == made["id"]
        response = alice.get(f"/v1/watches/{made['id']}/hits")
        assert (response.status_code, response.json()["error"]["code"]) == (
            429,
            "too_many_listeners",
        )
        lines_of_bob = send_frames(bob, frames(images[:3], id="x", time=7.5))
        assert lines_of_bob == [{"done": {"frames": 3, "hits": 0, "errors": 0, "dropped": 0}}]
        for hits in (
            [next(lines) for _ in range(3)],
            [json.loads(socket.recv()) for _ in range(3)],
        ):
            assert {(hit["frame"], hit["time"], hit["label"]) for hit in hits} == {
                ("x", 7.5, "dogs")
            }
        with kway.client() as second:
            second.delete(f"/v1/watches/{made['id']}")
        assert next(lines) == {"end": "deleted"}
        assert json.loads(socket.recv()) == {"end": "deleted"}
        assert next(lines, None) is None


def test_a_disconnect_removes_the_listener_and_the_feed(
    kway: Kway, alice: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "WAIT_SECONDS", 1000.0)  # no heartbeat detects the disconnect
    made = create_watch(alice)
    with listening(alice, made["id"]), kway.socket(f"/v1/watches/{made['id']}/live") as socket:
        socket.recv()
        with kway.socket("/v1/feeds/door/frames"):
            eventually(lambda: kway.feeds.live._followers == 1)
        assert len(kway.board._listeners.of(made["id"])) == 2
    eventually(lambda: not kway.board._listeners.of(made["id"]))
    eventually(lambda: kway.feeds.live._task is None)


def test_invalid_frames_get_an_error_and_the_feed_continues(
    alice: httpx.Client, images: list[bytes]
) -> None:
    create_watch(alice)
    good = frames(images[:1])
    invalid = [
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
    lines = send_frames(alice, good + b"\n" + b"".join(invalid) + good)
    assert lines[0]["frame"] == 0
    errors = [(line["frame"], line["error"]["code"]) for line in lines[1:-2]]
    assert errors == [
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


def test_frame_ids_are_preserved_even_if_zero_or_empty(
    alice: httpx.Client, images: list[bytes]
) -> None:
    create_watch(alice)
    sent = [frames(images[:1], **fields) for fields in ({}, {"id": 0}, {"id": ""}, {})]
    assert [line["frame"] for line in send_frames(alice, b"".join(sent))[:-1]] == [0, 0, "", 3]


def test_invalid_frames_over_a_websocket_get_the_same_errors(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(alice)
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
def test_a_websocket_receives_the_reason_before_it_is_closed(
    kway: Kway, path: str, close: int, code: str
) -> None:
    with kway.socket(path) as socket:
        assert json.loads(socket.recv())["error"]["code"] == code
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == close


def test_a_latest_feed_drops_and_reports_outdated_frames(
    kway: Kway, alice: httpx.Client, images: list[bytes]
) -> None:
    create_watch(alice)
    with kway.socket("/v1/feeds/door/frames?latest=true") as socket:
        before, started = kway.counts.frames.count("dropped"), kway.model.started
        kway.model.gate.clear()
        try:
            socket.send(images[0])
            eventually(lambda: kway.model.started > started)
            for image in images[1:5]:
                socket.send(image)
            time.sleep(0.5)  # until they have arrived
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


def test_the_limits_of_watches_and_feeds_are_enforced(kway: Kway, alice: httpx.Client) -> None:
    body = {"classes": ["husky"], "threshold": 0, "ttl_seconds": 60}
    with kway.client(BOB) as bob:
        made = [client.post("/v1/watches", json=body) for client in [alice] * 5 + [bob] * 3]
    assert [one.status_code for one in made] == [201] * 4 + [429] + [201] * 2 + [429]
    assert made[4].json()["error"]["message"].startswith("you have reached your limit of 4 watches")
    with ExitStack() as sockets:
        for feed in "abc":
            sockets.enter_context(kway.socket(f"/v1/feeds/{feed}/frames"))
        eventually(lambda: kway.feeds.live._followers == 3)
        response = alice.post("/v1/feeds/d", content=b"", headers=NDJSON)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_feeds")
