"""Which ranks are slow: the others wait for them in every step, and none of them says so.

What counts is a rank's busy seconds, the step without the time spent waiting for others: by wall
clock all ranks of a synchronous step are equally slow.
"""

import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

# In short steps a factor says little: what a rank costs must be felt, too.
_FELT_SECONDS = 0.01


class Stragglers:
    """Busy seconds of `size` ranks over the last `window` steps, and who stands out.

    A rank is slow whose median is above `factor` times the median of the other ranks.
    """

    def __init__(
        self, size: int, *, window: int = 50, factor: float = 1.5, minutes_between: float = 30
    ) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=window)
        self._size, self._factor = size, factor
        self._seconds_between = 60 * minutes_between
        self._reported_at: float | None = None

    def add(self, busy_seconds: Sequence[float]) -> None:
        """One step's busy seconds, a number a rank in their order."""
        assert len(busy_seconds) == self._size, (len(busy_seconds), self._size)
        self._steps.append(tuple(busy_seconds))

    def busy_seconds(self) -> list[float]:
        """Each rank's median over the window; empty before the first step."""
        return [statistics.median(seconds) for seconds in zip(*self._steps, strict=True)]

    def slow_ranks(self) -> dict[int, float]:
        """Slow ranks and how many times the others' median they take; none before a full window."""
        if len(self._steps) < (self._steps.maxlen or 0) or self._size == 1:
            return {}
        busy = self.busy_seconds()
        order = sorted(busy)
        others = [_median_without(order, seconds) for seconds in busy]
        return {
            rank: mine / other if other else float("inf")
            for rank, (mine, other) in enumerate(zip(busy, others, strict=True))
            if mine > self._factor * other and mine - other > _FELT_SECONDS
        }

    def notice(self, now: float | None = None) -> str | None:
        """A line about the slowest rank, if any is slow and none was said for a while.

        `now` is in seconds of any steady clock.
        """
        now = time.monotonic() if now is None else now
        if self._reported_at is not None and now - self._reported_at < self._seconds_between:
            return None
        slow = self.slow_ranks()
        if not slow:
            return None
        self._reported_at = now
        rank = max(slow, key=lambda rank: slow[rank])
        more = f" (and {len(slow) - 1} more are slow)" if len(slow) > 1 else ""
        return (
            f"rank {rank} is slow{more}: {self.busy_seconds()[rank]:.3g} s of work a step, "
            f"{slow[rank]:.2g} times the other ranks', over {len(self._steps)} steps: look at its "
            "machine's clocks, temperature, disk and other processes"
        )


def _median_without(order: Sequence[float], value: float) -> float:
    """The median of the sorted `order`, of 2 or more, once `value` has been taken out of it."""
    index = bisect_left(order, value)
    # Elements from this index on have moved down by one.
    low, high = (
        order[middle + (middle >= index)]
        for middle in ((len(order) - 2) // 2, (len(order) - 1) // 2)
    )
    return (low + high) / 2
