"""The states of all ranks in the process group's store. Each rank writes its own state and reads
all states.

A call to a store whose host is suspended never returns, regardless of the timeout. A separate
thread therefore makes all calls, and callers wait for the result with their own timeout. If the
thread is stuck, the process must exit with `trainer.world.leave`.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
_OVER = "over"
_TIMEOUT_SECONDS = 2.0


class RankStore:
    """One rank's access to the shared states. `store` comes from `World.new_store`.

    `over` becomes true at the first `publish` after any rank has declared the end of the run. The
    other methods return None if the store does not respond within 2 seconds.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self.over = False
        self._rank, self._size, self._store = rank, size, store
        self._store.set_timeout(timedelta(seconds=_TIMEOUT_SECONDS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watchdog store")
        self._writing: Future[None] = Future()
        self._writing.set_result(None)

    def publish(self, text: str) -> None:
        """Write the text that the other ranks read, unless the last one is still being written or
        failed. Never blocks.
        """
        if self._writing.done() and self._writing.exception() is None:
            self._writing = self._thread.submit(self._write, text)

    def read(self) -> dict[int, str] | None:
        """Return the texts of all ranks that have written one."""
        return self._call(
            lambda: {
                rank: self._store.get(str(rank)).decode()
                for rank in range(self._size)
                if self._store.check([str(rank)])
            }
        )

    def claim(self) -> bool | None:
        """Declare the end of the run. Returns whether this rank was the first to do so."""
        self.over = True
        return self._call(lambda: self._store.add(_OVER, 1) == 1)

    def is_over(self) -> bool | None:
        """Return whether any rank has declared the end of the run."""
        return self.over or self._call(lambda: self._store.check([_OVER]))

    def close(self) -> None:
        """Close the connection. Call this before the process group is destroyed."""
        self._call(lambda: None)
        self._thread.shutdown(wait=False, cancel_futures=True)
        del self._store

    def _write(self, text: str) -> None:
        # Stop writing once the run is over, because the store may be closed at any time and torch
        # would then print errors.
        if not self.over:
            self._store.set(str(self._rank), text)
            self.over = self._store.check([_OVER])

    def _call(self, operation: Callable[[], Result]) -> Result | None:
        try:
            return self._thread.submit(operation).result(_TIMEOUT_SECONDS)
        except (TimeoutError, dist.DistError):  # the host is suspended or has exited
            return None


def host_of_store() -> str:
    """Return the process that hosts the store, as text."""
    address = os.environ.get("MASTER_ADDR", "this machine")
    # This is the same rule as in torch: either the launcher or rank 0 hosts the store.
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'the launcher' if by_launcher else 'rank 0'} on {address}"
