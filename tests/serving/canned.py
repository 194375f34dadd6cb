"""A server of a test that says what it was told to, whatever it is asked."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

LINES = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Its URL, and the heads of what it was asked; the last of the answers is given over and over.

    After each it says no more, and reads on until the client has left.
    """
    heads: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener's end
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
