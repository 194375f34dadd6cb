"""A TCP server that sends prepared responses, regardless of the requests."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Start a server and yield its URL and the requests it receives. The server sends `answers` in
    order, then repeats the last one.

    After each response, the server shuts down its side of the connection and reads until the client
    disconnects.
    """
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener was closed
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
        thread.join(60)
        listener.close()
