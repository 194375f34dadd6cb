"""The states of all ranks in the process group's store. Each rank writes its own state and reads
all states.

A call to a store whose host is suspended never returns, regardless of the timeout. A separate
thread therefore makes all calls, and callers wait for the result with their own timeout.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
_OVER = "over"


class RankStore:
    """One rank's access to the shared states.

    `store` comes from `World.new_store`. `over` becomes true at most `interval` seconds after any
    rank declares the end of the run.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, interval: float) -> None:
        self.host = _host()
        self.over = False
        self._rank, self._size, self._interval = rank, size, interval
        self._store = store
        self._store.set_timeout(timedelta(seconds=max(1.0, interval)))
        self._text = ""
        self._closed = False
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Use a daemon thread, so that the process can exit even if the thread is stuck in the
        # store.
        self._thread = threading.Thread(target=self._serve, name="watchdog store", daemon=True)
        self._thread.start()

    def publish(self, text: str) -> None:
        """Set the text that the other ranks read. Never blocks; the thread writes it later."""
        self._text = text

    def read(self, *, limit_seconds: float) -> dict[int, str] | None:
        """Return the texts of all ranks that have written one, or None if the store does not
        respond in time.
        """
        return self._request(self._texts, limit_seconds)

    def claim(self, *, limit_seconds: float) -> bool | None:
        """Declare the end of the run. Returns whether this rank was the first to do so, or None if
        the store does not respond in time.
        """
        return self._request(self._claim, limit_seconds)

    def is_over(self, *, limit_seconds: float) -> bool | None:
        """Return whether any rank has declared the end of the run, or None if the store does not
        respond in time.
        """
        return self._request(lambda: self._store.check([_OVER]), limit_seconds)

    def close(self) -> None:
        """Stop the thread and close the connection. Call this before the process group is
        destroyed."""
        self._closed = True
        self._requests.put(lambda: None)
        self._thread.join(timeout=2 * self._interval)

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._beat()
                self._next_request()
        except dist.DistError:
            # The process that hosts the store has exited. `read` returns None from now on.
            self._closed = True
        finally:
            del self._store

    def _beat(self) -> None:
        # Stop writing once the run is over, because the store may be closed at any time and torch
        # would then print errors.
        if self._text and not self.over:
            self._store.set(str(self._rank), self._text)
            self.over = self._store.check([_OVER])

    def _next_request(self) -> None:
        try:
            request = self._requests.get(timeout=self._interval)
        except queue.Empty:
            return
        request()

    def _request(self, operation: Callable[[], Result], limit_seconds: float) -> Result | None:
        result: Future[Result] = Future()

        def request() -> None:
            result.set_result(operation())

        self._requests.put(request)
        try:
            return result.result(limit_seconds)
        except TimeoutError:
            return None

    def _claim(self) -> bool:
        self.over = True
        return self._store.add(_OVER, 1) == 1

    def _texts(self) -> dict[int, str]:
        ranks = [rank for rank in range(self._size) if self._store.check([str(rank)])]
        return {rank: self._store.get(str(rank)).decode() for rank in ranks}


def _host() -> str:
    """Return the process that hosts the store, as text."""
    address = os.environ.get("MASTER_ADDR", "this machine")
    # This is the same rule as in torch: either the launcher or rank 0 hosts the store.
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'the launcher' if by_launcher else 'rank 0'} on {address}"
