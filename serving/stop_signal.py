"""Wait for a stop signal while the server is running."""

import signal
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import FrameType

import httpx

from data.processes import handled_signals
from data.retry import TransientError

_POLL_SECONDS = 1.0


class ServerLostError(TransientError):
    """The server no longer responds and cannot restart itself."""


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


class Listening:
    """Checks that something is listening at `url`. A server that responds slowly is overloaded, not
    lost."""

    def __init__(self, url: str, *, lost_seconds: float = 60.0) -> None:
        self._url, self._lost_seconds = url, lost_seconds
        # A new connection each time: an old one may lead to a proxy that Ray has replaced.
        self._client = httpx.Client(
            trust_env=False, timeout=5.0, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._listened = time.monotonic()

    def check(self) -> None:
        """Raises ServerLostError if nothing has been listening for `lost_seconds`."""
        try:
            self._client.get(f"{self._url}/health")
        except httpx.ConnectError:
            if time.monotonic() - self._listened > self._lost_seconds:
                raise ServerLostError(
                    f"nothing has been listening on {self._url} for {self._lost_seconds:g} s. "
                    "Start the server again"
                ) from None
        except httpx.HTTPError:
            self._listened = time.monotonic()
        else:
            self._listened = time.monotonic()
