"""Signals that make a run save and stop. All ranks agree on a signal before they act on it.

The handler only sets a flag, because it may run in the middle of a collective or a file write.
"""

import signal
from types import FrameType
from typing import Any

from data.processes import handled_signals
from trainer.process.exit_codes import INTERRUPTED, PREEMPTED

# Schedulers send SIGUSR1 some time before they stop a job, closing a terminal sends SIGHUP, and
# Ctrl-C sends SIGINT.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Preempted(Exception):  # noqa: N818 - not an error
    """The run was saved and is stopping because of a signal. The same command resumes it."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(
            f"stopped by {signal_name}; run the same command again to resume from the last "
            "checkpoint"
        )
        self.signal_name = signal_name

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.signal_name == "SIGINT" else PREEMPTED


class StopSignals:
    """Records the `handled_signals` of STOP_SIGNALS in `received` inside the context.

    A second Ctrl-C raises KeyboardInterrupt. Use this class in the main thread, as Python requires
    for signal handlers.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in handled_signals(STOP_SIGNALS):
            self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
