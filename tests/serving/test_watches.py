"""Standing queries: the routes and the service are real and listen on a port; one test has Ray."""

import asyncio
import base64
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from serving.config import ServingConfig
from serving.errors import install_handlers
from serving.http.access import Access
from serving.http.feeds import feed_routes
from serving.http.query import query_routes
from serving.http.watches import watch_routes
from serving.model import Model
from serving.service import Service
from serving.tokens import Tokens
from serving.watches.board import Board
from serving.watches.feed import Feeds
from serving.watches.outbox import Outbox
from serving.watches.registry import Registry
from serving.watches.watch import (
    Letters,
    Terms,
    UnknownListenerError,
    UnknownWatchError,
    WatchLimitError,
)
from tests.serving import in_process
from tests.system.processes import ROOT
from tests.tiny_bundle import NAMES, write

ALICE, BOB = "a" * 32, "b" * 32
NDJSON = {"content-type": "application/x-ndjson"}
MOST, FRAME_BYTES = 4, 20_000


class _Counts:
    """Counts for the service and for feeds."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.hits = 0

    def count(self, *, outcome: str, inputs: int, seconds: float) -> None: ...

    def count_frame(self, outcome: str) -> None:
        self.frames.append(outcome)

    def count_hits(self, count: int) -> None:
        self.hits += count

    def count_lost_hits(self, count: int) -> None: ...

    def set_watches(self, count: int) -> None: ...


class _Counted:
    """A model whose forward passes, and products with class weights, are counted."""

    def __init__(self, model: Model) -> None:
        self.begun = self.forwards = self.products = 0
        self.gate = threading.Event()
        self.gate.set()
        features, scores = model.features, model.bundle.scores

        def counted_features(prepared):
            self.begun += 1
            self.gate.wait(20)
            self.forwards += 1
            return features(prepared)

        def counted_scores(*arguments):
            self.products += 1
            return scores(*arguments)

        model.features, model.bundle.scores = counted_features, counted_scores


class Kway:
    """A server in this process, and what is counted in it."""

    def __init__(self, bundle: Path, tokens: Path) -> None:
        config = ServingConfig(
            threads=torch.get_num_threads(),
            token_file=tokens,
            max_watches=6,
            max_watches_per_client=MOST,
            max_watch_listeners=2,
            min_watch_ttl_seconds=0.2,
            max_watch_ttl_seconds=100,
            max_frame_bytes=FRAME_BYTES,
            max_feeds=3,
            feed_idle_seconds=20,
        )
        model = Model.open(bundle)
        self.model, self.counts = _Counted(model), _Counts()
        self.board = Board(config)
        service = Service(model, config, self.counts)
        self.feeds = Feeds(service, self.board, self.counts)
        self.api = FastAPI()
        install_handlers(self.api)
        self.api.add_middleware(Access, tokens=Tokens(tokens))
        for routes in (
            query_routes(service),
            watch_routes(service, self.board),
            feed_routes(self.feeds),
        ):
            self.api.include_router(routes)
        self.url = ""

    def client(self, token: str = ALICE) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20)

    def socket(self, path: str, token: str = ALICE):
        headers = {"authorization": f"Bearer {token}"}
        return connect(
            self.url.replace("http", "ws") + path, additional_headers=headers, open_timeout=20
        )


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kway]:
    folder = tmp_path_factory.mktemp("watches")
    tokens = folder / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{ALICE}\n{BOB}\n")
    running = Kway(write(folder / "pets"), tokens)
    with in_process.listening(running.api, ws="websockets-sansio") as url:
        running.url = url
        yield running


@pytest.fixture
def alice(kway: Kway) -> Iterator[httpx.Client]:
    """A client; its watches, and Bob's, are gone afterwards."""
    with kway.client() as client, kway.client(BOB) as bob:
        yield client
        for one in (client, bob):
            for watch in one.get("/v1/watches").json()["watches"]:
                one.delete(f"/v1/watches/{watch['id']}")


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    random = np.random.default_rng(0)
    made = [random.integers(0, 256, (20, 31), dtype=np.uint8) // (place + 1) for place in range(6)]
    return [cv2.imencode(".png", picture)[1].tobytes() for picture in made]


def encoded(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def frames(pictures: list[bytes], **fields: object) -> bytes:
    lines = [json.dumps({"image": encoded(picture), **fields}) for picture in pictures]
    return ("\n".join(lines) + "\n").encode()


def watch(client: httpx.Client, **fields: object) -> dict:
    body = {"classes": ["husky"], "threshold": -1e6, "ttl_seconds": 60, **fields}
    answer = client.post("/v1/watches", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def send(client: httpx.Client, content: bytes, feed: str = "door", **asked: object) -> list[dict]:
    answer = client.post(f"/v1/feeds/{feed}", content=content, headers=NDJSON, params=asked)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def eventually(happened) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def listening(client: httpx.Client, watch_id: str) -> Iterator[Iterator[dict]]:
    with client.stream("GET", f"/v1/watches/{watch_id}/hits") as answer:
        assert answer.status_code == 200
        lines = (json.loads(line) for line in answer.iter_lines())
        assert next(lines) == {"listening": watch_id}
        yield lines


def test_hits_are_what_a_query_decides(alice: httpx.Client, pictures: list[bytes]) -> None:
    asked = {"classes": list(NAMES), "images": [encoded(picture) for picture in pictures]}
    scores = [
        verdict["score"]
        for result in alice.post("/v1/query", json=asked).json()["results"]
        for verdict in result["verdicts"]
    ]
    questions = [
        {"classes": ["husky", "samoyed"], "recall": 0.9},
        {"classes": list(NAMES), "threshold": float(np.median(scores))},
    ]
    made = [watch(alice, **{"threshold": None, **question}) for question in questions]
    lines = send(alice, frames(pictures))
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
    counts = {"frames": len(pictures), "hits": total, "errors": 0, "dropped": 0}
    assert lines[-1] == {"done": counts}


def test_many_watches_cost_one_forward_pass_and_one_product_a_frame(
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
) -> None:
    made = [watch(alice, classes=list(NAMES[: place + 1])) for place in range(MOST)]
    forwards, products = kway.model.forwards, kway.model.products
    with kway.socket("/v1/feeds/door/frames?acknowledge=true") as socket:
        for place, picture in enumerate(pictures):
            socket.send(picture)
            hits = [json.loads(socket.recv()) for _ in range(1 + 2 + 3 + 4)]
            assert {hit["watch"] for hit in hits} == {one["id"] for one in made}
            assert json.loads(socket.recv()) == {"answered": place, "hits": 10}
    assert kway.model.forwards - forwards == len(pictures)
    assert kway.model.products - products == len(pictures)


def test_a_frame_that_no_watch_looks_at_costs_no_forward_pass(
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
) -> None:
    watch(alice, feeds=["gate"])
    forwards = kway.model.forwards
    assert [*send(alice, frames(pictures))[-1]["done"].values()] == [6, 0, 0, 0]
    assert kway.model.forwards == forwards
    assert send(alice, frames(pictures), "gate")[-1]["done"]["hits"] == 6


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


def test_another_clients_watch_is_invisible_and_its_hits_are(
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
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
        assert send(bob, frames(pictures))[-1]["done"]["hits"] == 0
    assert alice.get(where).json() == made


def test_a_listener_hears_hits_of_frames_that_others_send(
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
) -> None:
    made = watch(alice, label="dogs")
    with (
        listening(alice, made["id"]) as lines,
        kway.socket(f"/v1/watches/{made['id']}/live") as socket,
        kway.client(BOB) as bob,
    ):
        assert json.loads(socket.recv()) == {"listening": made["id"]}
        answer = alice.get(f"/v1/watches/{made['id']}/hits")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_watches")
        own = send(bob, frames(pictures[:3], id="x", time=7.5))
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


def test_a_disconnect_frees_its_listener_and_its_feed(kway: Kway, alice: httpx.Client) -> None:
    made = watch(alice)
    with listening(alice, made["id"]), kway.socket(f"/v1/watches/{made['id']}/live") as socket:
        socket.recv()
        with kway.socket("/v1/feeds/door/frames"):
            eventually(lambda: kway.feeds.live._followers == 1)
        assert len(kway.board._listeners.of(made["id"])) == 2
    eventually(lambda: not kway.board._listeners.of(made["id"]))
    eventually(lambda: kway.feeds.live._task is None)


def test_garbage_frames_are_answered_and_the_feed_goes_on(
    alice: httpx.Client, pictures: list[bytes]
) -> None:
    watch(alice)
    good = frames(pictures[:1])
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


def test_a_socket_answers_garbage_in_the_same_way(
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
) -> None:
    made = watch(alice)
    with kway.socket("/v1/feeds/door/frames") as socket:
        for message in (b"x", "{", bytes(FRAME_BYTES + 1), "", json.dumps({"text": "a"})):
            socket.send(message)
        codes = [json.loads(socket.recv())["error"]["code"] for _ in range(4)]
        assert codes == ["not_a_picture", "invalid_json", "frame_too_long", "not_a_text_model"]
        socket.send(pictures[0])
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
    kway: Kway, alice: httpx.Client, pictures: list[bytes]
) -> None:
    watch(alice)
    with kway.socket("/v1/feeds/door/frames?latest=true") as socket:
        before, begun = kway.counts.frames.count("dropped"), kway.model.begun
        kway.model.gate.clear()
        try:
            socket.send(pictures[0])
            eventually(lambda: kway.model.begun > begun)
            for picture in pictures[1:5]:
                socket.send(picture)
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


# ---------------------------------------------------------------------------- the plain parts


def terms(ttl_seconds: float = 10) -> Terms:
    return Terms(classes=("husky",), recall=None, threshold=0, ttl_seconds=ttl_seconds)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_lives_for_its_time_and_a_change_renews_it() -> None:
    clock, kept = Clock(), {}
    registry = Registry(ServingConfig(), clock=clock, kept=kept)
    first, second = registry.create("a", terms()), registry.create("a", terms(20))
    clock.now += 9
    assert registry.change("a", first.id, {}).expires_at == clock.now + 10
    clock.now += 10.5
    with pytest.raises(UnknownWatchError):
        registry.get("a", first.id)
    assert registry.sweep() == [first.id]
    assert [one.id for one in registry.owned("a")] == [second.id] == list(kept)


def test_changes_name_what_is_new_and_what_is_gone_since_a_version() -> None:
    registry = Registry(ServingConfig(max_watches_per_client=1), clock=Clock(), kept={})
    first = registry.create("a", terms())
    with pytest.raises(WatchLimitError):
        registry.create("a", terms())
    start = registry.changes_since("", 0)
    assert start.is_whole
    second = registry.create("b", terms())
    registry.remove("a", first.id)
    news = registry.changes_since(start.epoch, start.version)
    assert (news.is_whole, news.gone) == (False, (first.id,))
    assert [held.watch for held in news.held] == [second]
    for _ in range(1001):
        registry.remove("a", registry.create("a", terms()).id)
    late = registry.changes_since(start.epoch, start.version)
    assert late.is_whole
    assert [held.watch for held in late.held] == [second]


def test_a_slow_listener_loses_the_oldest_hits_and_is_told_how_many() -> None:
    async def run() -> None:
        board = Board(ServingConfig(max_listener_hits=3))
        watch_id = (await board.create("a", terms())).id
        listener = await board.listen("a", watch_id)
        await board.publish([(watch_id, str(place)) for place in range(5)], {watch_id: 10})
        letters = await board.take(listener, 0)
        assert (letters.lines, letters.dropped) == (("2", "3", "4"), 12)
        assert await board.take(listener, 0) == Letters((), 0, None)

    asyncio.run(run())


def test_hits_that_do_not_fit_the_outbox_are_counted_and_told() -> None:
    lost, told = [], []

    class _Slow(Board):
        async def publish(self, hits, counts) -> None:
            told.append((list(hits), dict(counts)))
            await asyncio.sleep(0)

    async def run() -> None:
        outbox = Outbox(_Slow(ServingConfig()), most=2, on_lost=lost.append)
        for place in range(5):
            outbox.put("w", str(place))
        await outbox._task

    asyncio.run(run())
    assert told == [([("w", "3"), ("w", "4")], {"w": 3})]
    assert lost == [1, 1, 1]


def test_a_listener_whose_replica_died_is_forgotten() -> None:
    async def run() -> None:
        clock = Clock()
        board = Board(ServingConfig(), clock=clock)
        watch_id = (await board.create("a", terms(1000))).id
        listener = await board.listen("a", watch_id)
        assert (await board.changed_since("", 0, 0)).held[0].is_listened
        clock.now += 61
        assert not (await board.changed_since("", 0, 0)).held[0].is_listened
        with pytest.raises(UnknownListenerError):
            await board.take(listener, 0)

    asyncio.run(run())


RAY = """
import asyncio, os, sys
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
import ray
from serving.config import ServingConfig
from serving.watches.actor import RayWatches
from serving.watches.live import LiveWatches
from serving.watches.watch import *

async def main():
    config = ServingConfig(max_watches_per_client=2)
    one, other = RayWatches(config), RayWatches(config)
    terms = Terms(classes=("husky",), recall=None, threshold=0, ttl_seconds=60)
    kept, gone = [await one.create("a", terms) for _ in range(2)]
    try:
        await other.create("a", terms)
    except WatchLimitError as error:
        assert str(error).startswith("you have 2 watches")
    else:
        raise AssertionError
    await other.remove("a", gone.id)
    listener = await one.listen("a", kept.id)
    await other.publish([(kept.id, "hit")], {kept.id: 4})
    assert await one.take(listener, 5) == Letters(("hit",), 4, None)
    live = LiveWatches(other)
    async with live.followed():
        before = live.version
        ray.kill(one._actor, no_restart=False)
        epoch = before[0]
        while epoch == before[0]:
            try:
                epoch = (await other.changed_since("", 0, 0)).epoch
            except WatchesDownError:
                await asyncio.sleep(0.1)
        assert await other.get("a", kept.id) == kept
        assert [watch.id for watch in await other.owned("a")] == [kept.id]
        try:
            await one.take(listener, 0)
        except UnknownListenerError:
            pass
        else:
            raise AssertionError
        new = await one.create("a", terms)
        while not any(held.watch == new for held in live.of("door", "a")):
            await asyncio.sleep(0.02)
        assert live.version[0] != before[0]
        assert len(live) == 2

ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
         object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
asyncio.run(asyncio.wait_for(main(), 60))
ray.shutdown()
print("all is well")
"""


@pytest.mark.slow
def test_watches_in_the_ray_actor_outlive_its_restart() -> None:
    with TemporaryDirectory(prefix="kway-ray-") as folder:
        run = subprocess.run(
            [sys.executable, "-c", RAY, folder], cwd=ROOT, capture_output=True, text=True
        )
    assert run.stdout.endswith("all is well\n"), run.stderr[-3000:]
