"""Wait for a stop signal while the server is healthy."""

import signal
import socket
import sys
import time
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from data.processes import handled_signals

_POLL_SECONDS = 1.0
# Ray's daemons. They are child processes of this process, and Ray does not restart them.
_DAEMONS = ("gcs_server", "raylet")


class HealthTimeouts(NamedTuple):
    """Timeouts in seconds. `response` applies to a single response. If /health has not responded
    for `slow` seconds, a warning is printed. If nothing has been listening on the server's port for
    `lost` seconds, the server is considered lost."""

    response: float = 5.0
    slow: float = 30.0
    lost: float = 60.0


class ServerLostError(ChildProcessError):
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

    def wait(self, url: str, timeouts: HealthTimeouts | None = None) -> None:
        """Wait for a signal. Raises ServerLostError if Ray exits or nothing is listening at
        `url` anymore.

        A server that responds slowly is considered overloaded, not lost. A warning is printed to
        standard error once per slow period, and `wait` continues.
        """
        self._raises = False
        health = _Health(url, timeouts or HealthTimeouts())
        while not self._receives_within(_POLL_SECONDS):
            health.check()

    def _receives_within(self, seconds: float) -> bool:
        try:
            self._received.get(timeout=seconds)
        except Empty:
            return False
        return True


class _Health:
    def __init__(self, url: str, timeouts: HealthTimeouts) -> None:
        self._url, self._timeouts = url, timeouts
        # Creating a client takes 20 ms, because it reads the system's certificates. Each check
        # opens a new connection, because an old one may lead to a replaced HAProxy process.
        self._client = httpx.Client(
            trust_env=False,
            timeout=timeouts.response,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._daemons = [one for one in psutil.Process().children() if one.name() in _DAEMONS]
        self._answered = self._listened = time.monotonic()
        self._is_slow = False

    def check(self) -> None:
        """Check the server once. Raises ServerLostError."""
        if any(_has_exited(daemon) for daemon in self._daemons):
            raise ServerLostError("Ray has exited, so the server has stopped. Start it again")
        if self._answers():
            self._answered = self._listened = time.monotonic()
            self._is_slow = False
        elif _listens(self._url, self._timeouts.response):
            self._listened = time.monotonic()
        self._check_timeouts(time.monotonic())

    def _answers(self) -> bool:
        try:
            answer = self._client.get(f"{self._url}/health")
        except httpx.HTTPError:
            return False
        return answer.status_code < 500

    def _check_timeouts(self, now: float) -> None:
        if now - self._listened > self._timeouts.lost:
            seconds = self._timeouts.lost
            raise ServerLostError(
                f"nothing has been listening on {self._url} for {seconds:g} s. Start the server "
                "again"
            )
        if not self._is_slow and now - self._answered > self._timeouts.slow:
            self._is_slow = True
            seconds = self._timeouts.slow
            print(
                f"warning: {self._url}/health has not responded for {seconds:g} s. Either the "
                "server is overloaded or its replicas have failed",
                file=sys.stderr,
                flush=True,
            )


def _has_exited(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _listens(url: str, seconds: float) -> bool:
    """Return whether a server is listening at `url`. Returns False only if the connection is
    refused, so a server that is slow to accept counts as listening."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=seconds).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True
