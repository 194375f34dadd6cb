"""Progress lines for output that is not a terminal."""

import sys
import time

from data.messages import Report

_SECONDS_BETWEEN_LINES = 10


def plain_lines(verb: str, unit: str = "samples") -> Report:
    """Return a `report` for output that is not a terminal. It prints a line every few seconds."""
    rate = Rate()
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        speed = rate.of(done)
        if speed == 0 or time.monotonic() - last < _SECONDS_BETWEEN_LINES:
            return
        last = time.monotonic()
        left = (total - done) / speed
        print(
            f"{verb} {done:,} of {total:,} {unit}, {speed:,.0f} {unit}/s, {left:,.0f} s left",
            file=sys.stderr,
            flush=True,
        )

    return report


class Rate:
    """Units per second since the first report; resumed jobs do not start at zero."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def of(self, done: int) -> float:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        seconds = now - self._first[0]
        return (done - self._first[1]) / seconds if seconds > 0 else 0.0
