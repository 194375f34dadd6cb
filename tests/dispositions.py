"""Sets the disposition of signals in this process and in the processes that it starts.

A shell starts the background jobs of a script with SIGINT ignored, and nohup ignores SIGHUP. The
processes that such a job starts inherit this, so a test that sends these signals sets them first.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DEFAULT = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}


@contextmanager
def default_signals() -> Iterator[None]:
    """Handle SIGINT and SIGHUP as in the foreground of a terminal. Use this context manager or
    decorator in the main thread."""
    yield from _handled(_DEFAULT)


@contextmanager
def ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore signals, as in the background of a script or under nohup. Use this context manager or
    decorator in the main thread."""
    yield from _handled(dict.fromkeys(numbers, signal.SIG_IGN))


def is_ignored(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ignores a signal (Linux)."""
    return _is_in("SigIgn", pid, number)


def is_handled(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal (Linux)."""
    return _is_in("SigCgt", pid, number)


def _is_in(name: str, pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(rf"^{name}:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def _handled(handlers: dict) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
