"""Wait for the wish to stop, while the server answers."""

import signal
import threading
import time
from types import FrameType

import httpx

_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 60.0


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP as a flag. Before `hold`, during the start: SystemExit(0)."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._raises = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # by nohup
                signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._set.set()
        if self._raises:
            self._raises = False  # a second signal must not interrupt the clean-up
            raise SystemExit(0)

    def hold(self, url: str) -> None:
        """Wait for a signal. Raises ChildProcessError when the server at `url` falls silent."""
        self._raises = False
        heard = time.monotonic()
        while not self._set.wait(_POLL_SECONDS):
            if _answers(url):
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                raise ChildProcessError(
                    f"{url} has not answered for {_SILENCE_SECONDS:.0f} s: start it again"
                )


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False
