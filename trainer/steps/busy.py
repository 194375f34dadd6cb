"""How long a rank works between two meetings with the others: what names a slow one."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Around = Callable[[str], AbstractContextManager[None]]


class BusyClock:
    """Seconds that this rank did not spend waiting in collectives. `around` stands about each of
    them, within whatever else wants to."""

    def __init__(self, outer: Around) -> None:
        self._outer = outer
        self._start, self._waited = time.perf_counter(), 0.0

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A collective named `name`: for `heads.collectives.listening`."""
        begin = time.perf_counter()
        try:
            with self._outer(name):
                yield
        finally:
            self._waited += time.perf_counter() - begin

    def take(self) -> float:
        """Busy seconds since the last call."""
        now = time.perf_counter()
        busy = now - self._start - self._waited
        self._start, self._waited = now, 0.0
        return busy
