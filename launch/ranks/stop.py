"""Stop signals of the launcher, and termination of the rank processes.

Each rank runs in its own session, so Ctrl-C in a terminal reaches only the launcher.
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from data.processes import handled_signals
from trainer.process.signals import STOP_SIGNALS

_POLL_SECONDS = 0.05
_REPEAT_SECONDS = 1.0
_REAP_SECONDS = 10

Processes = Sequence["subprocess.Popen[Any]"]


class StopRequest:
    """A context in which the first stop signal raises SignalException in the main thread. Later
    signals are ignored, except that Ctrl-C sets `is_urgent`."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.is_urgent = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # torch would install handlers that raise on every signal; an empty list disables them.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        for number in handled_signals(STOP_SIGNALS):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            raise SignalException("received a stop signal", self.number)
        self.is_urgent |= number == signal.SIGINT

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def wait_until_ended(processes: Processes, seconds: float) -> None:
    """Wait until all processes have exited, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def end_processes(
    processes: Processes,
    number: signal.Signals,
    seconds: float,
    *,
    repeat: bool = False,
    stop: StopRequest | None = None,
) -> bool:
    """Send each process the signal and kill those that are still running after `seconds`.

    Returns whether any process was killed. repeat: send the signal every second. A rank may merely
    record the first signal; a later one terminates it once its handlers are removed. stop: kill
    immediately when this request becomes urgent.
    """
    deadline, due = time.monotonic() + seconds, 0.0
    while running := _running(processes):
        now = time.monotonic()
        if now >= deadline or (stop is not None and stop.is_urgent):
            _kill(running)
            return True
        if now >= due:
            for process in running:
                process.send_signal(number)
            due = now + _REPEAT_SECONDS if repeat else math.inf
        time.sleep(_POLL_SECONDS)
    return False


def _kill(processes: Processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        # A process blocked in the kernel cannot be reaped and must not block the launcher.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)


def _running(processes: Processes) -> Processes:
    return [process for process in processes if process.poll() is None]
