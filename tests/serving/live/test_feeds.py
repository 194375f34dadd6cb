"""Watches and feeds on a real server with Ray, its actor, HAProxy and two replicas."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from http.client import HTTPConnection

import httpx
import psutil
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from serving.config import CLIENT_ADDRESS_HEADER, ServingConfig
from serving.http.streams import NDJSON
from tests.serving.live.servers import LISTENERS, REPLICAS
from tests.serving.started import Server, SharedServer
from tests.serving.watching import (
    OpenFeed,
    create_watch,
    feeding,
    frames,
    images,
    listening,
    socket_to,
)

__all__ = ["images"]  # a fixture
HEADER_TIMEOUT_SECONDS = 7.0


@pytest.fixture
def server(open_server: SharedServer) -> Server:
    return open_server.get()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """A client whose watches are deleted after the test."""
    with httpx.Client(base_url=server.url, timeout=30) as opened:
        yield opened
        for one in opened.get("/v1/watches").json()["watches"]:
            opened.delete(f"/v1/watches/{one['id']}")


def processes(server: Server, name: str) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if name in child.name()]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def receive(socket: ClientConnection) -> dict:
    """Return the next line that is not a heartbeat."""
    while (line := json.loads(socket.recv(timeout=30))) == {"waiting": True}:
        pass
    return line


def assert_hit(line: dict, watch: dict) -> None:
    assert line.get("watch") == watch["id"], line


@pytest.mark.slow
def test_hits_arrive_through_haproxy_before_the_request_body_ends(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    with feeding(server.url, "/v1/feeds/door?acknowledge=true") as feed:
        for index, image in enumerate(images):
            feed.send(frames([image]))
            hit = feed.line()
            assert hit is not None
            assert (hit["watch"], hit["frame"]) == (made["id"], index)
            assert feed.line() == {"answered": index, "hits": 1}
        feed.finish()
        done = {"frames": len(images), "hits": len(images), "errors": 0, "dropped": 0}
        assert feed.line() == {"done": done}
        assert feed.line() is None


@pytest.mark.slow
def test_a_feed_may_be_silent_for_longer_than_the_header_timeout(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    with (
        feeding(server.url, "/v1/feeds/door") as feed,
        socket_to(server.url, "/v1/feeds/gate/frames") as socket,
    ):
        time.sleep(HEADER_TIMEOUT_SECONDS + 1)
        feed.send(frames(images[:1]))
        socket.send(images[0])
        for hit in (feed.line(), receive(socket)):
            assert hit is not None
            assert hit["watch"] == made["id"]
        # Now exceed the idle timeout of feeds.
        hit = feed.line()
        assert hit is not None
        assert hit["error"]["code"] == receive(socket)["error"]["code"] == "idle"
        assert feed.line() is None
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=20)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4408


def test_http_and_websocket_listeners_receive_hits_in_order_and_the_end_line(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    with (
        listening(client, made["id"]) as lines,
        socket_to(server.url, f"/v1/watches/{made['id']}/live") as socket,
        socket_to(server.url, "/v1/feeds/door/frames") as feed,
        httpx.Client(base_url=server.url) as other,
    ):
        assert receive(socket)["listening"] == made["id"]
        for image in images:
            feed.send(image)
            assert_hit(receive(feed), made)
        for hits in ([next(lines) for _ in images], [receive(socket) for _ in images]):
            assert [hit["frame"] for hit in hits] == list(range(len(images)))
        other.delete(f"/v1/watches/{made['id']}")
        assert next(lines) == receive(socket) == {"end": "deleted"}


async def connect_with_retries(url: str) -> AsyncConnection:
    """Open a WebSocket; retry while the replica is busy."""
    while True:
        try:
            return await connect_async(url)
        except InvalidStatus as error:
            if not is_busy(error.response.status_code, error.response.headers):
                raise
            await asyncio.sleep(0.2)


def is_busy(status: int, headers: Mapping[str, str]) -> bool:
    return (status, headers.get("retry-after")) == (429, "1")


@pytest.mark.slow
def test_a_loopback_server_without_tokens_rejects_other_host_names(server: Server) -> None:
    response = httpx.get(f"{server.url}/v1/classes", headers={"host": "evil.example"})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "other_host")
    port = server.url.rpartition(":")[2]
    response = httpx.get(f"{server.url}/v1/classes", headers={"host": f"localhost:{port}"})
    assert response.status_code == 200


@pytest.mark.slow
def test_without_tokens_each_address_has_its_own_limits(server: Server) -> None:
    per_client = ServingConfig().max_feeds_per_client
    with ExitStack() as opened:

        def status_of_feed(address: str, **forged: str) -> int:
            connection = HTTPConnection(
                server.url.removeprefix("http://"), timeout=20, source_address=(address, 0)
            )
            opened.enter_context(closing(connection))
            connection.putrequest("POST", "/v1/feeds/door")
            for name, value in {"Content-Type": NDJSON, "Content-Length": "2", **forged}.items():
                connection.putheader(name, value)
            connection.endheaders(b"\n")
            return connection.getresponse().status

        forged = [{CLIENT_ADDRESS_HEADER: f"10.0.0.{i}"} for i in range(REPLICAS * per_client + 2)]
        statuses = [status_of_feed("127.0.0.1", **one) for one in forged]
        assert 2 <= statuses.count(429) < len(forged)
        assert status_of_feed("127.0.0.2") == 200


@pytest.mark.slow
def test_listeners_on_all_replicas_receive_hits_and_do_not_block_requests(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    live = f"{server.url.replace('http', 'ws')}/v1/watches/{made['id']}/live"

    async def run() -> list[dict]:
        num_sockets = REPLICAS * LISTENERS + 10
        async with asyncio.timeout(60):
            sockets = await asyncio.gather(
                *(connect_with_retries(live) for _ in range(num_sockets))
            )
            first = [json.loads(await socket.recv()) for socket in sockets]
            await asyncio.to_thread(send_requests)
            received = [
                json.loads(await socket.recv())["frame"]
                for socket, line in zip(sockets, first, strict=True)
                if "listening" in line
            ]
            assert set(received) == {0}
            await asyncio.gather(*(socket.close() for socket in sockets))
        return first

    def send_requests() -> None:
        for _ in range(4):
            assert client.get("/v1/classes").status_code == 200
        with socket_to(server.url, "/v1/feeds/door/frames") as feed:
            feed.send(images[0])
            assert_hit(receive(feed), made)

    def both_replicas_accept() -> bool:
        first = asyncio.run(run())
        rejected = [line["error"]["code"] for line in first if "error" in line]
        assert set(rejected) == {"too_many_listeners"}
        return len(first) - len(rejected) > LISTENERS  # more than one replica accepts

    eventually(both_replicas_accept)  # HAProxy may not know the second replica yet


@pytest.mark.slow
def test_watches_and_feeds_survive_the_death_of_the_actor(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    (actor,) = processes(server, "WatchActor")
    with (
        socket_to(server.url, "/v1/feeds/door/frames") as feed,
        socket_to(server.url, f"/v1/watches/{made['id']}/live") as listener,
    ):
        assert receive(listener)["listening"] == made["id"]
        feed.send(images[0])
        first = receive(feed)
        assert_hit(first, made)
        assert receive(listener) == first
        actor.kill()
        feed.send(images[1])
        second = receive(feed)
        assert_hit(second, made)
        assert second["cursor"] == 2
        line = receive(listener)
        assert line["error"]["code"] in ("listener_lost", "watches_down")

        def is_available() -> bool:
            response = client.get("/v1/watches")
            assert response.status_code in (200, 503), response.text
            return response.status_code == 200

        eventually(is_available)
        assert client.get(f"/v1/watches/{made['id']}").json() == made
        with socket_to(server.url, f"/v1/watches/{made['id']}/live?after=1") as resumed:
            assert receive(resumed)["listening"] == made["id"]
            assert receive(resumed) == second
            feed.send(images[2])
            assert receive(resumed) == receive(feed)
    assert [one.pid for one in processes(server, "WatchActor")] != [actor.pid]


@pytest.mark.slow
def test_feeds_end_if_their_replica_is_killed_and_new_feeds_work(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    made = create_watch(client)
    before = {one.pid: one for one in processes(server, "ServeReplica")}
    assert len(before) == REPLICAS
    with ExitStack() as opened:
        feeds = [opened.enter_context(feeding(server.url, "/v1/feeds/door")) for _ in range(4)]
        for feed in feeds:
            feed.send(frames(images[:1]))
            hit = feed.line()
            assert hit is not None
            assert hit["watch"] == made["id"]
        next(iter(before.values())).kill()
        ended = [is_ended(feed, images[1]) for feed in feeds]
        assert any(ended)
    with feeding(server.url, "/v1/feeds/door") as feed:
        feed.send(frames(images[:1]))
        hit = feed.line()
        assert hit is not None
        assert hit["watch"] == made["id"]
    assert client.get(f"/v1/watches/{made['id']}").json() == made
    eventually(lambda: len(set(pids(server)) - {*before}) == 1)
    with socket_to(server.url, "/v1/feeds/door/frames") as socket:
        socket.send(images[0])
        assert receive(socket)["watch"] == made["id"]


def pids(server: Server) -> list[int]:
    return [one.pid for one in processes(server, "ServeReplica")]


def is_ended(feed: OpenFeed, image: bytes) -> bool:
    """Send a frame and return whether the feed has broken off before its last line."""
    try:
        feed.send(frames([image]))
        hit = feed.line()
    except OSError:
        return True
    if hit is None:
        return True
    assert "watch" in hit
    return False


@pytest.mark.slow
def test_feeds_survive_an_haproxy_reload_after_a_replica_is_lost(
    server: Server, client: httpx.Client, images: list[bytes]
) -> None:
    """With Ray's default settings, HAProxy would close the feeds 120 s after the reload."""
    create_watch(client, ttl_seconds=600)

    def requests_by_replica() -> dict[str, float]:
        pattern = r'kway_query_seconds_count\{.*replica="(\w+)".*\} (\S+)'
        found = re.findall(pattern, client.get("/metrics").text)
        return {replica: float(count) for replica, count in found}

    before = requests_by_replica()  # includes replicas that other tests have killed

    def both_replicas_respond() -> bool:
        client.post("/v1/query")
        found = requests_by_replica().items()
        return sum(count > before.get(replica, 0) for replica, count in found) == REPLICAS

    eventually(both_replicas_respond)  # HAProxy may not know the second replica yet
    with ExitStack() as opened:
        feeds = [opened.enter_context(feeding(server.url, "/v1/feeds/door")) for _ in range(6)]
        processes(server, "ServeReplica")[0].kill()
        feeds = [feed for feed in feeds if not is_ended(feed, images[0])]
        assert feeds
        max_processes, deadline = 0, time.monotonic() + 150
        while time.monotonic() < deadline:
            assert [is_ended(feed, images[0]) for feed in feeds] == [False] * len(feeds)
            max_processes = max(max_processes, len(processes(server, "haproxy")))
            time.sleep(1)
        assert max_processes > 1, "HAProxy did not reload"
        for feed in feeds:
            feed.finish()
            assert feed.response.read()
    # The old process exits after its last stream.
    eventually(lambda: len(processes(server, "haproxy")) == 1)
