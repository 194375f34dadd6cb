"""Forwards errors from a server's other processes to the `kway serve` process.

Replicas append errors to a file, and this process prints them to standard error. Ray would write
them only to its session folder, which is removed at exit.

HAProxy writes a line to a FIFO for each response with a status of 400 or above, and kway counts
these lines. HAProxy's own counters are not sufficient: they count only by status class, and they
are lost whenever the set of replicas changes, because a new HAProxy process replaces the old one.
Errors are most likely at such times. Ray's collector of such lines reads a datagram socket, which
drops all but the first ten lines of a burst; a FIFO buffers thousands.
"""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

_POLL_SECONDS = 0.3
_END = b"end\n"  # stops the thread that reads the FIFO


class HttpError(NamedTuple):
    """An error response: its protocol (http or grpc), its status, and whether its source is the
    proxy or a replica."""

    protocol: str
    status: str
    source: str


def append_errors(path: Path) -> None:
    """Append this process's kway log to the file `path`."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("kway").addHandler(handler)


@contextmanager
def shown_errors(path: Path) -> Iterator[None]:
    """Inside the context, copy everything that is appended to the file `path` to standard error."""
    path.touch()
    stopped = threading.Event()
    with path.open(encoding="utf-8", errors="replace") as file:
        thread = threading.Thread(target=_follow, args=(file, stopped), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def _follow(file: TextIO, stopped: threading.Event) -> None:
    last = False
    while not last:
        last = stopped.wait(_POLL_SECONDS)
        if text := file.read():
            print(text, end="", file=sys.stderr, flush=True)


@contextmanager
def counted_http_errors(fifo: Path) -> Iterator[None]:
    """Create `fifo` and, inside the context, count the errors in its lines.

    Start Ray and HAProxy inside the context.
    """
    os.mkfifo(fifo, 0o600)
    # Also open it for writing, so that reads never reach the end of the file.
    descriptor = os.open(fifo, os.O_RDWR)
    thread = threading.Thread(target=_count, args=(descriptor,), name="http errors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(descriptor, _END)
        thread.join()
        os.close(descriptor)


def _count(descriptor: int) -> None:
    metrics = None
    with open(descriptor, "rb", closefd=False) as lines:
        for line in lines:
            if line == _END:
                return
            if metrics is None:  # HAProxy has responded, so Ray is running
                from serving.deploy.metrics import HttpErrorMetrics

                metrics = HttpErrorMetrics()
            if (error := parse_error(line)) is not None:
                metrics.count(error)


def parse_error(line: bytes) -> HttpError | None:
    """Return the error in HAProxy's line `PROTOCOL STATUS TERMINATION`, or None if the status is
    not an error or the client disconnected first."""
    protocol, _, rest = line.decode("ascii", "replace").partition(" ")
    status, _, termination = rest.partition(" ")
    is_error = len(status) == 3 and "400" <= status <= "599"
    if not is_error or termination.startswith("C"):
        return None
    # HAProxy has terminated the session itself unless the first character is "-".
    return HttpError(protocol, status, "replica" if termination.startswith("-") else "proxy")
