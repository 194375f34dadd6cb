"""A signal to the launcher that asks the run to stop: the first is obeyed, the rest are patience.

Ranks are sessions of their own, so that a terminal's Ctrl-C reaches the launcher alone.
"""

import os
import signal
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from trainer.process.signals import ASKS_TO_STOP


class StopRequest:
    """While it is entered the first signal to stop raises SignalException, wherever the launcher
    waits; after it only a Ctrl-C means anything: `in_a_hurry`. On leaving all is as before."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.in_a_hurry = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        # torch would set handlers of its own that raise each time; an empty name sets none.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        for number in ASKS_TO_STOP:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number = signal.Signals(number)
            raise SignalException("the run was asked to stop", self.number)
        self.in_a_hurry |= number == signal.SIGINT

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
