"""The states of all ranks in the process group's store: each rank writes its own and reads all.

A call to a store whose host was stopped does not return, whatever its timeout says: all calls are
made by a separate thread, and the caller waits for the answer no longer than its limit.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Answer = TypeVar("Answer")
_OVER = "over"


class RankStore:
    """One rank's side of the board.

    `topic` is the same on all ranks and new in every run of them: an older run's words may still
    be in the store. `over` turns true, within `interval` seconds, once a rank has claimed the end.
    """

    def __init__(self, topic: str, *, rank: int, size: int, interval: float) -> None:
        self.host = _host()
        self.over = False
        self._rank, self._size, self._interval = rank, size, interval
        # A connection of its own: the process group may hold the other one while it waits.
        self._store = dist.PrefixStore(topic, _get_default_store().clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=max(1.0, interval)))
        self._text = ""
        self._closed = False
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A daemon: one that is stuck in the store must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="watchdog board", daemon=True)
        self._thread.start()

    def publish(self, text: str) -> None:
        """What the others are to read from now on; never waits."""
        self._text = text

    def read(self, *, limit_seconds: float) -> dict[int, str] | None:
        """The texts of all ranks that wrote one; None where the store does not answer."""
        return self._ask(self._texts, limit_seconds)

    def claim(self, *, limit_seconds: float) -> bool | None:
        """Declare the run over: whether this rank was the first; None without an answer."""
        return self._ask(self._claim, limit_seconds)

    def is_over(self, *, limit_seconds: float) -> bool | None:
        """Whether a rank has claimed the end by now; None without an answer."""
        return self._ask(lambda: self._store.check([_OVER]), limit_seconds)

    def close(self) -> None:
        """End the thread and drop the connection, before the process group is taken down."""
        self._closed = True
        self._requests.put(lambda: None)
        self._thread.join(timeout=2 * self._interval)

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._beat()
                self._next_request()
        except dist.DistError:
            # The host has gone. From now on nobody answers, which is what `read` says.
            self._closed = True
        finally:
            del self._store

    def _beat(self) -> None:
        # Once the end is declared the store may go at any moment, about which torch is loud.
        if self._text and not self.over:
            self._store.set(str(self._rank), self._text)
            self.over = self._store.check([_OVER])

    def _next_request(self) -> None:
        try:
            request = self._requests.get(timeout=self._interval)
        except queue.Empty:
            return
        request()

    def _ask(self, question: Callable[[], Answer], limit_seconds: float) -> Answer | None:
        answer: Future[Answer] = Future()

        def request() -> None:
            answer.set_result(question())

        self._requests.put(request)
        try:
            return answer.result(limit_seconds)
        except TimeoutError:
            return None

    def _claim(self) -> bool:
        self.over = True
        return self._store.add(_OVER, 1) == 1

    def _texts(self) -> dict[int, str]:
        ranks = [rank for rank in range(self._size) if self._store.check([str(rank)])]
        return {rank: self._store.get(str(rank)).decode() for rank in ranks}


def _host() -> str:
    """Who keeps the store, in words."""
    address = os.environ.get("MASTER_ADDR", "this machine")
    # As torch decides it: the launcher's own store, or one in rank 0's process.
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'the launcher' if by_launcher else 'rank 0'} on {address}"
