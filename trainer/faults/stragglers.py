"""Detects slow ranks, which make all other ranks wait in every step.

Ranks are compared by their busy seconds, the time per step in which a rank does not wait for others
(`Phases.take_busy`). The wall-clock duration of a synchronous step is the same on all ranks.
"""

import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

# Minimum difference in seconds per step. If steps are short, a large factor alone is not
# significant.
_MIN_DIFFERENCE_SECONDS = 0.01


class Stragglers:
    """The busy seconds of `size` ranks over the last `window` steps, and the ranks that are
    slow.

    A rank is slow if its median exceeds the median of the other ranks' medians by more than a
    factor of `factor` and by more than 10 ms. `notice` returns a message at most once every
    `minutes_between` minutes.
    """

    def __init__(
        self, size: int, *, window: int = 50, factor: float = 1.5, minutes_between: float = 30
    ) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=window)
        self._size, self._factor = size, factor
        self._seconds_between = 60 * minutes_between
        self._reported_at: float | None = None

    def add(self, busy_seconds: Sequence[float]) -> None:
        """Add the busy seconds of one step: one number per rank, in rank order."""
        assert len(busy_seconds) == self._size, (len(busy_seconds), self._size)
        self._steps.append(tuple(busy_seconds))

    def busy_seconds(self) -> list[float]:
        """Return each rank's median over the window. The list is empty before the first step."""
        return [statistics.median(seconds) for seconds in zip(*self._steps, strict=True)]

    def slow_ranks(self) -> dict[int, float]:
        """Return the slow ranks, each with the ratio of its median to the median of the other
        ranks. The result is empty until the window is full.
        """
        if len(self._steps) < (self._steps.maxlen or 0) or self._size == 1:
            return {}
        busy = self.busy_seconds()
        order = sorted(busy)
        others = [_median_without(order, seconds) for seconds in busy]
        return {
            rank: mine / other if other else float("inf")
            for rank, (mine, other) in enumerate(zip(busy, others, strict=True))
            if mine > self._factor * other and mine - other > _MIN_DIFFERENCE_SECONDS
        }

    def notice(self, now: float | None = None) -> str | None:
        """Return a message about the slowest rank if a rank is slow and enough time has passed
        since the last message.

        `now` is the time in seconds of any monotonic clock.
        """
        now = time.monotonic() if now is None else now
        if self._reported_at is not None and now - self._reported_at < self._seconds_between:
            return None
        slow = self.slow_ranks()
        if not slow:
            return None
        self._reported_at = now
        rank = max(slow, key=lambda rank: slow[rank])
        more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        return (
            f"rank {rank} is slow{more}: over {len(self._steps)} steps, it worked "
            f"{self.busy_seconds()[rank]:.3g} s per step, {slow[rank]:.2g} times as long as the "
            "other ranks; check its machine: clock rates, temperature, disk and other processes"
        )


def _median_without(order: Sequence[float], value: float) -> float:
    """Return the median of the sorted list `order`, which has at least 2 values, after removing
    `value`.
    """
    index = bisect_left(order, value)
    # Removing `value` shifts the elements after it down by one.
    low, high = (
        order[middle + (middle >= index)]
        for middle in ((len(order) - 2) // 2, (len(order) - 1) // 2)
    )
    return (low + high) / 2
