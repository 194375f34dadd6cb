"""Timings for jobs that run `alone`: contenders take turns, and ratios are computed per round."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.timing import take_turns
from experiments.papers.job import Folders
from experiments.papers.section import Verdict

Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Median:
    """The median of `n` numbers and its 95% confidence interval from order statistics.

    `low` and `high` are infinite if there are too few numbers.
    """

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2) -> str:
        """Return `1.23 (1.20 to 1.26)`, or only the value if the interval is infinite."""
        shown = f"{self.value:.{digits}f}"
        if math.isinf(self.high):
            return shown
        return f"{shown} ({self.low:.{digits}f} to {self.high:.{digits}f})"

    def above(self, least: float) -> Verdict:
        """Return the verdict on the claim that the median is above `least`."""
        if self.low > least:
            return "holds"
        return "does not hold" if self.high < least else "not settled"


def median(numbers: Sequence[float]) -> Median:
    """Return the median with its interval. Raises ValueError if `numbers` is empty."""
    if not len(numbers):
        raise ValueError("cannot take the median of an empty sequence: pass at least one number")
    ordered = np.sort(np.asarray(numbers, dtype=np.float64))
    middle, n = float(np.median(ordered)), len(ordered)
    # Each number is below the true median with probability 1/2.
    rank = int(stats.binom.ppf(0.025, n, 0.5))
    if rank == 0:
        return Median(middle, -math.inf, math.inf, n)
    return Median(middle, float(ordered[rank - 1]), float(ordered[n - rank]), n)


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> Median:
    """Return the median over rounds of `theirs` / `ours`."""
    return median((np.asarray(theirs) / np.asarray(ours)).tolist())


def timed(
    contenders: Mapping[str, Callable[[], object]],
    folders: Folders,
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Return the seconds of each contender by round, measured by `take_turns`.

    Progress is written to the job's log. The GPU is synchronized before `clock` is read.
    """
    with (folders.work / "log.txt").open("a") as log, redirect_stderr(log):
        found = take_turns(
            contenders, title="rounds", rounds=rounds, seconds=seconds, clock=synchronous(clock)
        )
    return {name: times.tolist() for name, times in found.items()}


def synchronous(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that waits for pending GPU work, if there is a GPU, before reading `clock`."""
    import torch

    if not torch.cuda.is_available():
        return clock

    def read() -> float:
        torch.cuda.synchronize()
        return clock()

    return read


def milliseconds(times: Sequence[float]) -> str:
    """Return the median in milliseconds with three significant digits."""
    return f"{1e3 * float(np.median(times)):,.3g}"
