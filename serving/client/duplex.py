"""An httpx transport that sends the body of a request while it reads the response.

httpx's own transport sends the complete body before it reads anything. It would deadlock with a
kway server, which stops reading a stream if the client does not read the answers. This transport
starts iterating over the body only after the server has accepted the request, so a rejected request
does not consume any of the body. It reads at most one part ahead. Uses HTTP/1.1 with one connection
per request and ignores proxies from the environment.
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
    """Iterates over `parts` in a thread. The socket `wake` becomes readable when `take` may return
    a part, so it can be used with a selector.

    The thread is a daemon. After `close`, it ends when the iterable yields its next part.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.wake, waker = socket.socketpair()
        self.wake.setblocking(False)
        self.is_over = False
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(1)
        self._is_closed = False
        Thread(target=self._run, args=(parts, waker), daemon=True).start()

    def take(self) -> bytes | None:
        """Return the next part, or None if it is not available yet. At the end, sets `is_over` and
        returns None.

        Raises any exception that the iterable raised.
        """
        with suppress(BlockingIOError):
            self.wake.recv(16)
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, bytes):
            return item
        self.is_over = True
        if item is not None:
            raise item
        return None

    def close(self) -> None:
        self._is_closed = True
        with suppress(queue.Empty):
            self._queue.get_nowait()  # the thread may be waiting for space in the queue
        self.wake.close()

    def _run(self, parts: Iterable[bytes], waker: socket.socket) -> None:
        last = None
        with waker:
            try:
                for part in parts:
                    if self._is_closed:
                        return
                    self._put(part, waker)
            except BaseException as error:  # `take` raises it in the other thread
                last = error
            if not self._is_closed:  # otherwise `put` could block forever
                self._put(last, waker)

    def _put(self, item: bytes | BaseException | None, waker: socket.socket) -> None:
        self._queue.put(item)
        with suppress(OSError):  # already closed
            waker.send(b".")


T = TypeVar("T")
_CHUNK_BYTES = 65536
_PORTS = {"http": 80, "https": 443}


class Duplex(httpx.BaseTransport):
    """A full-duplex transport. Sends `keep_alive` whenever the body yields nothing for
    `silence_seconds`.

    Raises httpx.TransportError for connection errors and, while the response is read, whatever the
    body raises. Applies the request's connect and read timeouts. The read timeout does not apply
    until the body ends, because the server may be waiting for more of the body.
    """

    def __init__(self, *, keep_alive: bytes, silence_seconds: float) -> None:
        self._keep_alive, self._silence_seconds = keep_alive, silence_seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the response once its headers have arrived. Reading the response sends the request
        body."""
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
    """Open a non-blocking connection. Use it from only one thread, because TLS connections are not
    thread-safe."""
    try:
        plain = socket.create_connection((url.host, url.port or _PORTS[url.scheme]), seconds)
        # send short lines without delay (disable Nagle's algorithm)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if url.scheme == "https":
            plain = httpx.create_ssl_context().wrap_socket(plain, server_hostname=url.host)
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    plain.setblocking(False)
    return plain


class _Exchange(httpx.SyncByteStream):
    """One request in progress. Iterating over it yields the response body and sends the request
    body."""

    def __init__(
        self, connection: socket.socket, keep_alive: bytes, silence: float, timeout: float
    ) -> None:
        self._socket, self._http = connection, h11.Connection(h11.CLIENT)
        self._keep_alive, self._silence, self._timeout = keep_alive, silence, timeout
        self._out = bytearray()
        # None until the request is accepted, and after the end of the body
        self._body: BodyReader | None = None

    def begin(self, request: httpx.Request) -> h11.Response:
        """Send the request headers and wait for the response headers."""
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
        """Close the connection. The rest of the request body is discarded."""
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
        """Receive data or, if there is none, send some. If both would block, wait.

        Receiving has priority: a server that blocks while sending its answers does not read any
        more of the body.
        """
        received = self._nonblocking(lambda: self._socket.recv(_CHUNK_BYTES))
        if received is not None:
            self._http.receive_data(received)
            return
        if not self._out:
            self._fill()
        if not self._out or not self._send():
            self._wait()

    def _fill(self) -> None:
        """Buffer the next part of the body, or its end, if it is available."""
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
            sent = self._nonblocking(lambda: self._socket.send(self._out))
        # The server no longer accepts data but may have sent the reason, so continue reading.
        except httpx.ReadError:
            self._out.clear()
            self._end_body()
            return True
        del self._out[: sent or 0]
        return bool(sent)

    def _nonblocking(self, operation: Callable[[], T]) -> T | None:
        """Return the result of `operation`, or None if it would block."""
        try:
            return operation()
        # TLS raises its own exceptions, which are not BlockingIOErrors.
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
            raise httpx.ReadTimeout(f"no data for {seconds:g} s")
        self._out += self._http.send(h11.Data(data=self._keep_alive))
