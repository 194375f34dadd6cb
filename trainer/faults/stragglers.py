"""Detects slow ranks, which make all other ranks wait in every step.

Ranks are compared by their busy seconds, the time per step in which a rank does not wait for others
(`Phases.take_busy`). The wall-clock duration of a synchronous step is the same on all ranks.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

_FACTOR = 1.5
# Minimum difference in seconds per step. If steps are short, a large factor alone is not
# significant.
_MIN_DIFFERENCE_SECONDS = 0.01
_SECONDS_BETWEEN_NOTICES = 30 * 60


class Stragglers:
    """The busy seconds of `size` ranks over the last `window` steps, and the ranks that are slow: a
    rank whose median exceeds the median of the other ranks' medians by more than a factor of 1.5
    and by more than 10 ms.
    """

    def __init__(self, size: int, *, window: int = 50) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=window)
        self._size, self._window = size, window
        self._noticed_at = float("-inf")

    def add(self, busy_seconds: Sequence[float]) -> None:
        """Add the busy seconds of one step: one number per rank, in rank order."""
        self._steps.append(tuple(busy_seconds))

    def busy_seconds(self) -> list[float]:
        """Return each rank's median over the window. The list is empty before the first step."""
        return [median(seconds) for seconds in zip(*self._steps, strict=True)]

    def slow_ranks(self) -> dict[int, float]:
        """Return the slow ranks, each with the ratio of its median to the median of the other
        ranks. The result is empty until the window is full.
        """
        if len(self._steps) < self._window or self._size == 1:
            return {}
        busy = self.busy_seconds()
        least, found = _FACTOR * min(busy), {}
        for rank, mine in enumerate(busy):
            # The median of the others, which is at least the minimum, takes long with many ranks.
            if mine <= least:
                continue
            other = median(busy[:rank] + busy[rank + 1 :])
            if mine > _FACTOR * other and mine - other > _MIN_DIFFERENCE_SECONDS:
                found[rank] = mine / other if other else float("inf")
        return found

    def notice(self, now: float | None = None) -> str | None:
        """Return a message about the slowest rank, if a rank is slow, at most every 30 minutes."""
        now = time.monotonic() if now is None else now
        if now - self._noticed_at < _SECONDS_BETWEEN_NOTICES or not (slow := self.slow_ranks()):
            return None
        self._noticed_at = now
        rank = max(slow, key=lambda rank: slow[rank])
        more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        return (
            f"rank {rank} is slow{more}: over {len(self._steps)} steps, it worked "
            f"{self.busy_seconds()[rank]:.3g} s per step, {slow[rank]:.2g} times as long as the "
            "other ranks; check its machine: clock rates, temperature, disk and other processes"
        )
