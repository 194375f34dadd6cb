"""An httpx transport that sends the body of a request while it reads the answer.

httpx's own transport sends all of the body first, but kway stops reading a stream whose answers are
not read. The body is taken only once the server has accepted the request, so that a rejected
request costs none of it, and at most one part ahead. HTTP/1.1, one connection a request; proxies of
the environment are ignored.
"""

import queue
import selectors
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import h11
import httpx


class BodyReader:
    """`wake` can be read from, as by a selector, where there may be something to `take`.

    The thread does not keep the program from its end, and leaves after `close` as soon as the
    iterable gives a part.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.wake, far = socket.socketpair()
        self.wake.setblocking(False)
        self.is_over = False
        self._found: queue.Queue[bytes | BaseException | None] = queue.Queue(1)
        self._is_closed = False
        Thread(target=self._run, args=(parts, far), daemon=True).start()

    def take(self) -> bytes | None:
        """The next part; None where there is none yet or, if `is_over`, no more.

        Raises what the iterable raised.
        """
        with suppress(BlockingIOError):
            self.wake.recv(16)
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return None
        if isinstance(found, bytes):
            return found
        self.is_over = True
        if found is not None:
            raise found
        return None

    def close(self) -> None:
        self._is_closed = True
        with suppress(queue.Empty):
            self._found.get_nowait()  # the thread may wait for this place
        self.wake.close()

    def _run(self, parts: Iterable[bytes], far: socket.socket) -> None:
        last = None
        with far:
            try:
                for part in parts:
                    if self._is_closed:
                        return
                    self._give(part, far)
            except BaseException as error:  # whatever it is: `take` raises it
                last = error
            if not self._is_closed:  # nobody would make room for it
                self._give(last, far)

    def _give(self, found: bytes | BaseException | None, far: socket.socket) -> None:
        self._found.put(found)
        with suppress(OSError):  # closed meanwhile
            far.send(b".")


T = TypeVar("T")
_CHUNK_BYTES = 65536
_PORTS = {"http": 80, "https": 443}


class Duplex(httpx.BaseTransport):
    """`keep_alive` is sent wherever the body has given nothing for `silence_seconds`.

    Raises httpx.TransportError for what is wrong with the connection, and, while the answer is
    read, whatever the body raises. The time limits are the request's own, in seconds: to connect,
    and for a connection on which nothing moves though it should. A server that takes what it is
    sent and says nothing is not noticed while the body has more to give: it may have to wait.
    """

    def __init__(self, *, keep_alive: bytes, silence_seconds: float) -> None:
        self._keep_alive, self._silence_seconds = keep_alive, silence_seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The answer as soon as its head is there; reading it sends the body."""
        limits = request.extensions["timeout"]
        connection = _connected(request.url, limits["connect"])
        exchange = _Exchange(connection, self._keep_alive, self._silence_seconds, limits["read"])
        try:
            head = exchange.begin(request)
        except BaseException:
            exchange.close()
            raise
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=exchange)


def _connected(url: httpx.URL, seconds: float) -> socket.socket:
    """A connection that never blocks. One thread alone uses it: TLS would not bear two."""
    try:
        plain = socket.create_connection((url.host, url.port or _PORTS[url.scheme]), seconds)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # lines are short, and wanted
        if url.scheme == "https":
            plain = httpx.create_ssl_context().wrap_socket(plain, server_hostname=url.host)
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    plain.setblocking(False)
    return plain


class _Exchange(httpx.SyncByteStream):
    """One request on its way: its iterator gives the body of the answer, and sends that of the
    request meanwhile."""

    def __init__(
        self, connection: socket.socket, keep_alive: bytes, silence: float, timeout: float
    ) -> None:
        self._socket, self._http = connection, h11.Connection(h11.CLIENT)
        self._keep_alive, self._silence, self._timeout = keep_alive, silence, timeout
        self._out = bytearray()
        self._body: BodyReader | None = None  # before the request is accepted, and after its end

    def begin(self, request: httpx.Request) -> h11.Response:
        """Send the head of the request and wait for that of the answer."""
        try:
            head = h11.Request(
                method=request.method, target=request.url.raw_path, headers=request.headers.raw
            )
            self._out += self._http.send(head)
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from error
        while not isinstance(event := self._next_event(), h11.Response):
            pass  # 100 Continue
        if event.status_code == 200:
            assert isinstance(request.stream, httpx.SyncByteStream)
            self._body = BodyReader(request.stream)
        return event

    def __iter__(self) -> Iterator[bytes]:
        while isinstance(event := self._next_event(), h11.Data):
            yield bytes(event.data)

    def close(self) -> None:
        """Hang up; what the body gives from now on is thrown away."""
        if self._body is not None:
            self._body.close()
        self._socket.close()

    def _next_event(self) -> Any:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if event is not h11.NEED_DATA:
                return event
            self._step()

    def _step(self) -> None:
        """Receive or, where there is nothing, send or, where that cannot be, wait for either."""
        received = self._tried(lambda: self._socket.recv(_CHUNK_BYTES))
        if received is not None:
            self._http.receive_data(received)
            return
        if not self._out:
            self._fill()
        if not self._out or not self._send():
            self._wait()

    def _fill(self) -> None:
        """Take the next part of the body, or its end, if it is there."""
        if self._body is None:
            return
        part = self._body.take()
        if part is not None:
            self._out += self._http.send(h11.Data(data=part))
        elif self._body.is_over:
            self._out += self._http.send(h11.EndOfMessage())
            self._end_body()

    def _end_body(self) -> None:
        if self._body is not None:
            self._body.close()
        self._body = None

    def _send(self) -> bool:
        try:
            sent = self._tried(lambda: self._socket.send(self._out))
        except httpx.ReadError:  # the server takes no more, but may have sent the reason: read on
            self._out.clear()
            self._end_body()
            return True
        del self._out[: sent or 0]
        return bool(sent)

    def _tried(self, do: Callable[[], T]) -> T | None:
        """None where it would have to wait."""
        try:
            return do()
        # TLS has names of its own for it, which are no BlockingIOError.
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise httpx.ReadError(str(error)) from error

    def _wait(self) -> None:
        awaited = None if self._out else self._body
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
            selector.register(self._socket, events)
            if awaited is not None:
                selector.register(awaited.wake, selectors.EVENT_READ)
            seconds = self._timeout if awaited is None else self._silence
            if selector.select(seconds):
                return
        if awaited is None:
            raise httpx.ReadTimeout(f"nothing moved for {seconds:g} s")
        self._out += self._http.send(h11.Data(data=self._keep_alive))
