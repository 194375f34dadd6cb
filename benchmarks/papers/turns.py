"""Timings for jobs that are `alone`: contenders take turns, and a ratio is one within a round."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.papers.job import Places
from benchmarks.papers.section import Verdict
from benchmarks.timing import take_turns

Seconds = dict[str, list[float]]


@dataclass(frozen=True)
class Median:
    """The median of `n` numbers between the order statistics that bound it with 95% confidence;
    `low` and `high` are infinite where there are too few."""

    value: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2) -> str:
        """`1.23 (1.20 to 1.26)`; the value alone where too few numbers say nothing of it."""
        shown = f"{self.value:.{digits}f}"
        if math.isinf(self.high):
            return shown
        return f"{shown} ({self.low:.{digits}f} to {self.high:.{digits}f})"

    @property
    def band(self) -> tuple[float, float]:
        """Low and high for a picture; the value itself where there are too few numbers."""
        if math.isinf(self.high):
            return self.value, self.value
        return self.low, self.high

    def above(self, least: float) -> Verdict:
        """Of a claim that the median is above `least`."""
        if self.low > least:
            return "holds"
        return "does not hold" if self.high < least else "not settled"


def median(numbers: Sequence[float]) -> Median:
    """Raises ValueError for no numbers."""
    if not len(numbers):
        raise ValueError("a median of no numbers")
    ordered = np.sort(np.asarray(numbers, dtype=np.float64))
    middle, n = float(np.median(ordered)), len(ordered)
    # A number falls below the median with probability 1/2.
    rank = int(stats.binom.ppf(0.025, n, 0.5))
    if rank == 0:
        return Median(middle, -math.inf, math.inf, n)
    return Median(middle, float(ordered[rank - 1]), float(ordered[n - rank]), n)


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> Median:
    """How many times as long theirs took, by rounds."""
    return median((np.asarray(theirs) / np.asarray(ours)).tolist())


def timed(
    contenders: Mapping[str, Callable[[], object]],
    places: Places,
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Seconds:
    """Seconds of each contender by round, as `take_turns` measures them; its progress goes into the
    job's log. A GPU has done its work when `clock` is read."""
    with (places.work / "log.txt").open("a") as log, redirect_stderr(log):
        found = take_turns(
            contenders, title="rounds", rounds=rounds, seconds=seconds, clock=synchronous(clock)
        )
    return {name: times.tolist() for name, times in found.items()}


def synchronous(clock: Callable[[], float]) -> Callable[[], float]:
    """`clock`, read when the GPU has done what it was given, if there is one."""
    import torch

    if not torch.cuda.is_available():
        return clock

    def read() -> float:
        torch.cuda.synchronize()
        return clock()

    return read


def milliseconds(times: Sequence[float]) -> str:
    """Their median, with three digits that count."""
    return f"{1e3 * float(np.median(times)):,.3g}"
