"""A request is canceled once its client has disconnected, if the client had sent the body."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send

from serving.http.disconnects import Disconnects
from tests.serving.in_process import listening

OK = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
BODY = {"type": "http.response.body", "body": b"ok"}


class Recorded:
    """An application that waits `seconds` after it has read the body and after its response."""

    def __init__(self, seconds: float, *, listens: bool = False) -> None:
        self._seconds, self._listens = seconds, listens
        self.events: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            while (await receive())["more_body"]:
                pass
            self.events.append("read")
            if self._listens:
                self.events.append((await receive())["type"])
            await asyncio.sleep(self._seconds)
            await send(OK)
            await send(BODY)
            self.events.append("answered")
            await asyncio.sleep(self._seconds)
            self.events.append("ended")
        except asyncio.CancelledError:
            self.events.append("canceled")
            raise

    def wait_for(self, event: str) -> None:
        deadline = time.monotonic() + 60
        while event not in self.events:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)


@contextmanager
def connected(application: Recorded) -> Iterator[socket.socket]:
    api = Disconnects(application)
    with listening(api, lifespan="off") as url:  # type: ignore[arg-type]
        address = urlsplit(url)
        assert address.hostname is not None
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            yield client


def send_body(client: socket.socket, *parts: bytes) -> None:
    length = sum(map(len, parts))
    client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
    for part in parts:
        client.sendall(part)
        time.sleep(0.01)


def test_a_request_whose_client_leaves_is_canceled() -> None:
    application = Recorded(60)
    with connected(application) as client:
        send_body(client, b"a", b"b")
        application.wait_for("read")
        client.close()
        application.wait_for("canceled")
    assert application.events == ["read", "canceled"]


def test_a_request_whose_client_stays_is_answered_and_ends() -> None:
    application = Recorded(1.0)  # longer than the time after which the connection is watched
    with connected(application) as client:
        send_body(client, b"a")
        answer = b""
        while not answer.endswith(b"ok"):
            answer += client.recv(1000)
        client.close()
        application.wait_for("ended")
    assert application.events == ["read", "answered", "ended"]


def test_an_application_that_listens_learns_that_the_client_has_left() -> None:
    application = Recorded(60, listens=True)
    with connected(application) as client:
        send_body(client, b"a")
        application.wait_for("read")
        client.close()
        application.wait_for("canceled")
    assert application.events in (["read", "canceled"], ["read", "http.disconnect", "canceled"])


def test_two_requests_on_one_connection_are_independent() -> None:
    application = Recorded(0.7)
    with connected(application) as client:
        for _ in range(2):
            send_body(client, b"a")
            answer = b""
            while not answer.endswith(b"ok"):
                answer += client.recv(1000)
        application.wait_for("ended")
    assert "canceled" not in application.events
    assert application.events.count("answered") == 2
