"""A TCP relay in front of a test server. It counts bytes and can cut connections."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from urllib.parse import urlsplit


class Relay:
    """Relays TCP from a free port to `url`. `sent` counts bytes to the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._far = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.sent = 0
        self._start(self._accept)

    def cut(self) -> None:
        """Close both sides of all open connections. New connections are accepted."""
        while self._open:
            one = self._open.pop()
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _start(self, target, *arguments: object) -> None:
        self._threads.append(Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._far)
                self.connections += 1
                self._open += [near, far]
                self._start(self._pass, near, far, True)
                self._start(self._pass, far, near, False)

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while part := source.recv(65536):
                if counts:
                    self.sent += len(part)
                target.sendall(part)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def relayed(url: str) -> Iterator[Relay]:
    relay = Relay(url)
    try:
        yield relay
    finally:
        relay.close()
