"""Standing queries through a real server: Ray, its actor, HAProxy and two replicas."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection, HTTPResponse

import httpx
import psutil
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from tests.serving.live.servers import LISTENERS, REPLICAS
from tests.serving.started import Server, SharedServer
from tests.serving.watching import Feeding, feeding, frames, images, listening, socket_to, watch

__all__ = ["images"]  # a fixture
HEAD_SECONDS = 7.0
HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "a2F5IG9mIDE2IGxldHRlcg==",
}


@pytest.fixture
def server(open_server: SharedServer) -> Server:
    return open_server.get()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A client; its watches are gone afterwards."""
    with httpx.Client(base_url=server.url, timeout=30) as opened:
        yield opened
        for one in opened.get("/v1/watches").json()["watches"]:
            opened.delete(f"/v1/watches/{one['id']}")


def processes(server: Server, name: str) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if name in child.name()]


def eventually(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.1)


def said(socket: ClientConnection) -> dict:
    """The next line that says more than that the server lives."""
    while (line := json.loads(socket.recv(timeout=30))) == {"waiting": True}:
        pass
    return line


def assert_hit(line: dict, of: dict) -> None:
    assert line.get("watch") == of["id"], line


def is_heard(feed: ClientConnection, listener: ClientConnection, image: bytes, made: dict) -> bool:
    """Whether a listener hears a frame's hit. It takes a moment until a replica knows of it."""
    feed.send(image)
    assert_hit(said(feed), made)
    try:
        line = json.loads(listener.recv(timeout=1))
    except TimeoutError:
        return False
    return line.get("watch") == made["id"]


def test_hits_come_back_through_haproxy_while_the_body_is_still_sent(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    with feeding(server.url, "/v1/feeds/door?acknowledge=true") as feed:
        for place, image in enumerate(images):
            feed.send(frames([image]))
            heard = feed.line()
            assert heard is not None
            assert (heard["watch"], heard["frame"]) == (made["id"], place)
            assert feed.line() == {"answered": place, "hits": 1}
        feed.finish()
        done = {"frames": len(images), "hits": len(images), "errors": 0, "dropped": 0}
        assert feed.line() == {"done": done}
        assert feed.line() is None


@pytest.mark.slow
def test_a_feed_is_silent_for_longer_than_a_head_may_take_and_goes_on(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    with (
        feeding(server.url, "/v1/feeds/door") as feed,
        socket_to(server.url, "/v1/feeds/gate/frames") as socket,
    ):
        time.sleep(HEAD_SECONDS + 1)
        feed.send(frames(images[:1]))
        socket.send(images[0])
        for heard in (feed.line(), said(socket)):
            assert heard is not None
            assert heard["watch"] == made["id"]
        # And then for longer than a feed may be.
        heard = feed.line()
        assert heard is not None
        assert heard["error"]["code"] == said(socket)["error"]["code"] == "idle"
        assert feed.line() is None
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4408


def test_listeners_over_both_ways_hear_hits_in_order_and_the_end(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    with (
        listening(client, made["id"]) as lines,
        socket_to(server.url, f"/v1/watches/{made['id']}/live") as socket,
        socket_to(server.url, "/v1/feeds/door/frames") as feed,
        httpx.Client(base_url=server.url) as other,
    ):
        assert said(socket) == {"listening": made["id"]}
        for image in images:
            feed.send(image)
            assert_hit(said(feed), made)
        for heard in ([next(lines) for _ in images], [said(socket) for _ in images]):
            assert [hit["frame"] for hit in heard] == list(range(len(images)))
        other.delete(f"/v1/watches/{made['id']}")
        assert next(lines) == said(socket) == {"end": "deleted"}


async def joined(url: str) -> AsyncConnection:
    """A WebSocket, asked for again wherever a replica had no place for it."""
    while True:
        try:
            return await connect_async(url)
        except InvalidStatus as error:
            if not is_busy(error.response.status_code, error.response.headers):
                raise
            await asyncio.sleep(0.2)


def is_busy(status: int, headers: Mapping[str, str]) -> bool:
    return (status, headers.get("retry-after")) == (429, "1")


def test_a_handshake_that_a_replica_has_no_place_for_is_answered_429(
    server: Server, client: httpx.Client
) -> None:
    path = f"/v1/watches/{watch(client)['id']}/live"
    address = server.url.removeprefix("http://")

    def is_refused() -> bool:
        with ExitStack() as opened:
            sent = [opened.enter_context(closing(HTTPConnection(address))) for _ in range(40)]
            # HAProxy then has so many connections to the replicas, and need not open them first.
            for answer in asked_at_once(server, sent, "/v1/classes", {}):
                answer.read()
            answers = asked_at_once(server, sent, path, HANDSHAKE)
            refused = [answer for answer in answers if answer.status != 101]
            for answer in refused:
                assert is_busy(answer.status, answer.headers)
                assert json.loads(answer.read())["error"]["code"] == "too_busy"
            return bool(refused)

    eventually(is_refused)


def asked_at_once(
    server: Server, connections: list[HTTPConnection], path: str, headers: dict[str, str]
) -> list[HTTPResponse]:
    """A replica sees all that it is asked in one moment, when no more than `max_requests` may
    wait until it looks at them."""
    with all_stopped(processes(server, "ServeReplica")):
        for connection in connections:
            connection.request("GET", path, headers=headers)
        time.sleep(0.4)  # until they are there
    return [connection.getresponse() for connection in connections]


@contextmanager
def all_stopped(stopped: list[psutil.Process]) -> Iterator[None]:
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()


def test_a_server_on_loopback_without_tokens_gives_another_name_no_answer(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/classes", headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "other_host")
    port = server.url.rpartition(":")[2]
    answer = httpx.get(f"{server.url}/v1/classes", headers={"host": f"localhost:{port}"})
    assert answer.status_code == 200


def test_listeners_at_both_replicas_hear_a_feed_of_one_and_take_no_place_of_other_requests(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    live = f"{server.url.replace('http', 'ws')}/v1/watches/{made['id']}/live"

    async def run() -> list[dict]:
        wanted = REPLICAS * LISTENERS + 10
        async with asyncio.timeout(60):
            sockets = await asyncio.gather(*(joined(live) for _ in range(wanted)))
            first = [json.loads(await socket.recv()) for socket in sockets]
            await asyncio.to_thread(ask)
            heard = [
                json.loads(await socket.recv())["frame"]
                for socket, line in zip(sockets, first, strict=True)
                if "listening" in line
            ]
            assert set(heard) == {0}
            await asyncio.gather(*(socket.close() for socket in sockets))
        return first

    def ask() -> None:
        for _ in range(4):
            assert client.get("/v1/classes").status_code == 200
        with socket_to(server.url, "/v1/feeds/door/frames") as feed:
            feed.send(images[0])
            assert_hit(said(feed), made)

    def is_of_both() -> bool:
        first = asyncio.run(run())
        refused = [line["error"]["code"] for line in first if "error" in line]
        assert set(refused) == {"too_many_listeners"}
        return len(first) - len(refused) > LISTENERS  # more than one replica takes

    eventually(is_of_both)  # HAProxy may not know of the second replica yet


def test_the_actor_is_killed_and_watches_live_on_while_a_feed_goes_on(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    (actor,) = processes(server, "WatchActor")
    with (
        socket_to(server.url, "/v1/feeds/door/frames") as feed,
        socket_to(server.url, f"/v1/watches/{made['id']}/live") as listener,
    ):
        assert said(listener) == {"listening": made["id"]}
        eventually(lambda: is_heard(feed, listener, images[0], made))
        actor.kill()
        feed.send(images[1])
        assert_hit(said(feed), made)
        while "error" not in (line := said(listener)):
            assert_hit(line, made)
        assert line["error"]["code"] in ("listener_lost", "watches_down")

        def found() -> bool:
            answer = client.get("/v1/watches")
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200

        eventually(found)
        assert client.get(f"/v1/watches/{made['id']}").json() == made
        with socket_to(server.url, f"/v1/watches/{made['id']}/live") as again:
            assert said(again) == {"listening": made["id"]}

            def heard() -> bool:
                feed.send(images[2])
                assert_hit(said(feed), made)
                try:
                    return "watch" in json.loads(again.recv(timeout=0.5))
                except TimeoutError:  # the replica does not know of the listener yet
                    return False

            eventually(heard)
    assert [one.pid for one in processes(server, "WatchActor")] != [actor.pid]


def test_a_replica_is_killed_and_its_feeds_end_and_new_ones_work(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = watch(client)
    before = {one.pid: one for one in processes(server, "ServeReplica")}
    assert len(before) == REPLICAS
    with ExitStack() as opened:
        feeds = [opened.enter_context(feeding(server.url, "/v1/feeds/door")) for _ in range(4)]
        for feed in feeds:
            feed.send(frames(images[:1]))
            heard = feed.line()
            assert heard is not None
            assert heard["watch"] == made["id"]
        next(iter(before.values())).kill()
        ended = [is_ended(feed, images[1]) for feed in feeds]
        assert any(ended)
    with feeding(server.url, "/v1/feeds/door") as feed:
        feed.send(frames(images[:1]))
        heard = feed.line()
        assert heard is not None
        assert heard["watch"] == made["id"]
    assert client.get(f"/v1/watches/{made['id']}").json() == made
    eventually(lambda: len(set(pids(server)) - {*before}) == 1)
    with socket_to(server.url, "/v1/feeds/door/frames") as socket:
        socket.send(images[0])
        assert said(socket)["watch"] == made["id"]


def pids(server: Server) -> list[int]:
    return [one.pid for one in processes(server, "ServeReplica")]


def is_ended(feed: Feeding, image: bytes) -> bool:
    """Whether a feed has ended without its last line; one that goes on answers."""
    try:
        feed.send(frames([image]))
        heard = feed.line()
    except OSError:
        return True
    if heard is None:
        return True
    assert "watch" in heard
    return False


@pytest.mark.slow
def test_feeds_of_a_replica_outlast_the_reload_of_haproxy_that_the_loss_of_another_causes(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    """With Ray's own setting, HAProxy would end them 120 s after the reload."""
    watch(client, ttl_seconds=600)

    def both_answer() -> bool:
        client.post("/v1/query")
        counts = re.findall(r"kway_query_requests_total\{.*", client.get("/metrics").text)
        return len({re.findall(r'replica="(\w+)"', line)[0] for line in counts}) == REPLICAS

    eventually(both_answer)  # HAProxy may not know of the second replica yet
    with ExitStack() as opened:
        feeds = [opened.enter_context(feeding(server.url, "/v1/feeds/door")) for _ in range(6)]
        processes(server, "ServeReplica")[0].kill()
        feeds = [feed for feed in feeds if not is_ended(feed, images[0])]
        assert feeds
        most_haproxies, until = 0, time.monotonic() + 150
        while time.monotonic() < until:
            assert [is_ended(feed, images[0]) for feed in feeds] == [False] * len(feeds)
            most_haproxies = max(most_haproxies, len(processes(server, "haproxy")))
            time.sleep(1)
        assert most_haproxies > 1, "HAProxy did not reload"
        for feed in feeds:
            feed.finish()
            assert feed.answer.read()
    # With its last stream, the old process ends.
    eventually(lambda: len(processes(server, "haproxy")) == 1)
