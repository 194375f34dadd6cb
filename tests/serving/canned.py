"""A test server that sends predefined responses, regardless of the request."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

LINES = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the server's URL and the heads of the requests it receives. Once `answers` are used up,
    the last one is repeated.

    After each response it sends nothing more, and reads until the client disconnects.
    """
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = listener.accept()
                with connection, suppress(ConnectionError):
                    heads.append(connection.recv(65536))
                    connection.sendall(answers[min(len(heads), len(answers)) - 1])
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

    thread = Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heads
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
