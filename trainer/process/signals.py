"""The signals that ask a run to save and end: noted at once, obeyed where all ranks agree.

A handler here only sets a flag: collectives and files are in the middle of something when it runs.
"""

import signal
from types import FrameType
from typing import Any

from trainer.process.exit_codes import INTERRUPTED, PREEMPTED

# SIGUSR1 is what schedulers send some time before the end, SIGHUP what a terminal that is closed,
# SIGINT is Ctrl-C.
ASKS_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Preempted(Exception):  # noqa: N818 - not an error
    """The run was saved and ends because of a signal; the same command goes on from there."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(
            f"stopped by {signal_name}; the same command goes on from the last checkpoint"
        )
        self.signal_name = signal_name

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.signal_name == "SIGINT" else PREEMPTED


class StopSignals:
    """While it is entered, the signals of ASKS_TO_STOP are noted in `received`.

    A second Ctrl-C is a KeyboardInterrupt. For the main thread only, as Python's handlers are.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in ASKS_TO_STOP:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, or in a shell's &
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == "SIGINT":
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
