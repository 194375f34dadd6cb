"""Wait for a stop signal while the server is running."""

import signal
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType

from data.processes import handled_signals

_POLL_SECONDS = 1.0


class StopSignal:
    """Makes SIGTERM end `wait`, and also SIGINT and SIGHUP unless the parent ignored them. Before
    `wait` is called, the signals raise SystemExit."""

    def __init__(self) -> None:
        # A signal handler can interrupt any line, including a wait on this queue. `SimpleQueue.put`
        # is reentrant, so it is safe in a handler that interrupts `get`. `threading.Event.set`
        # would deadlock if it interrupted `wait`.
        self._received: SimpleQueue[int] = SimpleQueue()
        self._raises = True
        for number in handled_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received.put(number)
        if self._raises:
            self._raises = False  # a second signal must not interrupt the clean-up
            raise SystemExit(0)

    @property
    def was_received(self) -> bool:
        """Whether a signal has arrived and `wait` has not consumed it yet."""
        return not self._received.empty()

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for a signal, and call `check` every second. Raises what it raises."""
        self._raises = False
        while True:
            try:
                self._received.get(timeout=_POLL_SECONDS)
            except Empty:
                check()
            else:
                return
