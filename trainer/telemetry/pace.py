"""How fast a run goes, and when it will be done."""

import time
from collections import deque

# Reports that the remaining time is judged by: enough to have evaluations and checkpoints among
# them, few enough to forget the first steps, which compile and warm up.
_REPORTS = 50


class Pace:
    """Times of the reported steps."""

    def __init__(self, *, start_step: int, num_steps: int) -> None:
        self._num_steps = num_steps
        self._last_time, self._last_step = time.perf_counter(), start_step
        self._reports = deque([(self._last_time, start_step)], maxlen=_REPORTS)

    def report(self, step: int, left_out_seconds: float) -> tuple[float, int]:
        """Training time in seconds, and steps, since the last report.

        What is left out is no training; the remaining time has its share of such all the same.
        """
        now = time.perf_counter()
        elapsed = max(now - self._last_time - left_out_seconds, 1e-9)
        steps = max(step - self._last_step, 1)
        self._last_time, self._last_step = now, step
        self._reports.append((now, step))
        return elapsed, steps

    def remaining_seconds(self) -> float:
        """At the pace of the last reports."""
        (first_time, first), (last_time, last) = self._reports[0], self._reports[-1]
        return (last_time - first_time) / max(last - first, 1) * (self._num_steps - last)
