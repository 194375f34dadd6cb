"""Ends the processes of the ranks: asked first, killed after a while or at a second Ctrl-C."""

import math
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from launch.ranks.stop import StopRequest

_POLL_SECONDS = 0.05
_AGAIN_SECONDS = 1.0
_REAP_SECONDS = 10

Processes = Sequence["subprocess.Popen[Any]"]


def wait_for_end(processes: Processes, seconds: float) -> None:
    """Until all have ended or the time is over."""
    deadline = time.monotonic() + seconds
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def end(
    processes: Processes,
    number: signal.Signals,
    seconds: float,
    *,
    again: bool = False,
    stop: StopRequest | None = None,
) -> bool:
    """Send each process the signal, give it time, kill what is left; whether that was needed.

    again: repeat it each second: a rank that only noted the first ends by a later one, when its
    handlers are gone. stop: where its second Ctrl-C comes, no more time is given.
    """
    deadline, due = time.monotonic() + seconds, 0.0
    while running := _running(processes):
        now = time.monotonic()
        if now >= deadline or (stop is not None and stop.in_a_hurry):
            _kill(running)
            return True
        if now >= due:
            for process in running:
                process.send_signal(number)
            due = now + _AGAIN_SECONDS if again else math.inf
        time.sleep(_POLL_SECONDS)
    return False


def _kill(processes: Processes) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        # One stuck in the kernel cannot be reaped; it must not keep the launcher.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_SECONDS)


def _running(processes: Processes) -> Processes:
    return [process for process in processes if process.poll() is None]
