"""Counts the errors that HAProxy answers, in the server's own process.

HAProxy writes a line for each answer of 400 and more into a FIFO. Its own counters do not suffice:
they start from zero with each process, so at each change of the replicas, when errors are most
likely, and count statuses by class only. Ray's collector of such lines reads a datagram socket,
which drops all but the first ten of a burst; a FIFO holds thousands.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

_END = b"end\n"


@contextmanager
def counted_http_errors(fifo: Path) -> Iterator[None]:
    """While inside, count the lines that come through `fifo`, a new file, by their status.

    Start Ray and HAProxy inside.
    """
    os.mkfifo(fifo, 0o600)
    descriptor = os.open(fifo, os.O_RDWR)  # for writing, too: else reads end with the last writer
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
            if metrics is None:  # Ray runs by now: HAProxy has answered
                from serving.deploy.metrics import HttpErrorMetrics

                metrics = HttpErrorMetrics()
            if (status := error_status(line)) is not None:
                metrics.count(status)


def error_status(line: bytes) -> str | None:
    """The status in a line of HAProxy, `STATUS TERMINATION`; None where the client left first."""
    status, _, termination = line.decode("ascii", "replace").partition(" ")
    is_error = len(status) == 3 and "400" <= status <= "599"
    return status if is_error and not termination.startswith("C") else None
