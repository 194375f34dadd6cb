"""Counts the errors that HAProxy answers, in the server's own process.

HAProxy writes a line for each answer of status 400 and above to a FIFO. Its own counters do not
suffice: they restart from zero with each process, that is at each change of the replicas, when
errors are most likely, and they count only by status class. Ray's collector of such lines reads a
datagram socket, which drops all but the first ten of a burst; a FIFO holds thousands.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

_END = b"end\n"


@contextmanager
def counted_http_errors(fifo: Path) -> Iterator[None]:
    """Create `fifo` and, inside the context, count its lines by status.

    Start Ray and HAProxy inside.
    """
    os.mkfifo(fifo, 0o600)
    descriptor = os.open(fifo, os.O_RDWR)  # opened for writing, so that reads never end
    thread = Thread(target=_count, args=(descriptor,), name="http errors", daemon=True)
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
            if metrics is None:  # HAProxy has answered, so Ray is running
                from serving.deploy.metrics import HttpErrorMetrics

                metrics = HttpErrorMetrics()
            if (status := error_status(line)) is not None:
                metrics.count(status)


def error_status(line: bytes) -> str | None:
    """The status in HAProxy's line `STATUS TERMINATION`; None if the client disconnected first."""
    status, _, termination = line.decode("ascii", "replace").partition(" ")
    is_error = len(status) == 3 and "400" <= status <= "599"
    return status if is_error and not termination.startswith("C") else None
