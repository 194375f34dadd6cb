"""A TCP relay that counts connections and bytes and can drop connections."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from urllib.parse import urlsplit


class Relay:
    """Relays connections from a free port to `url`. `sent` counts the bytes sent to the server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = self.sent = 0
        self._start(self._accept)

    def cut(self) -> None:
        """Close both sides of all connections. New connections are still accepted."""
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
            thread.join(60)

    def _start(self, target, *arguments: object) -> None:
        self._threads.append(Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self.connections += 1
                self._open += [client, server]
                self._start(self._forward, client, server, True)
                self._start(self._forward, server, client, False)

    def _forward(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
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
