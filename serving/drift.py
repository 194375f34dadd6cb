"""Drift: whether the share of inputs that pass a class's threshold has changed.

The inputs of each class and threshold are counted in periods. The first complete period is the
reference: k0 of n0 inputs passed. Each later period, with k of n, is compared with it by Fisher's
exact test. If inputs are independent and the share has not changed, k has a hypergeometric
distribution given k + k0, whatever the share is. The period has drifted if k is so small or so
large that the probability of such a value or a more extreme one is at most `FALSE_ALARMS` / 2. The
probability of a false alarm is therefore at most `FALSE_ALARMS` per class and period. Inputs that
depend on each other, such as consecutive frames of a video, cause more false alarms.

The reference is not the validation split, because the share of inputs that pass depends on which
classes the inputs of a deployment belong to.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from serving.schemas import Answer, ClassDrift

FALSE_ALARMS = 1e-4
_MOST_MONITORED = 10_000

Monitored = tuple[int, float]  # a class ID and a threshold


@dataclass
class _Counts:
    """The counts of the current period, the reference, and the result of the last period."""

    inputs: int = 0
    passed: int = 0
    reference: tuple[int, int] | None = None  # passed, inputs
    last: ClassDrift | None = None


class DriftMonitor:
    """Monitors up to 10,000 classes and thresholds, those used most recently. Use it from a single
    event loop. `on_period` is called with the result of each period after the first.
    """

    def __init__(self, period: int, on_period: Callable[[ClassDrift], None]) -> None:
        self._period, self._on_period = period, on_period
        self._counts: OrderedDict[Monitored, _Counts] = OrderedDict()
        self._drifted: set[Monitored] = set()

    def add_answer(self, answer: Answer) -> None:
        """Count the inputs of a query."""
        for column, decided in enumerate(answer.thresholds):
            if decided.threshold is not None:
                passed = sum(bool(result.verdicts[column].match) for result in answer.results)
                self._add((decided.class_id, decided.threshold), len(answer.results), passed)

    def add_frame(self, monitored: Iterable[Monitored], passed: Collection[Monitored]) -> None:
        """Count a frame of a feed, on which the criteria `monitored` were evaluated."""
        for each in monitored:
            self._add(each, 1, int(each in passed))

    def of(self, class_id: int, threshold: float) -> ClassDrift | None:
        """Return the result of the last complete period, or None before the second one ends."""
        counts = self._counts.get((class_id, threshold))
        return None if counts is None else counts.last

    def num_monitored(self) -> tuple[int, int]:
        """Return how many classes and thresholds have a reference, and how many of them drifted in
        the last complete period. Can be called from any thread.
        """
        counts = list(self._counts.copy().values())
        return sum(each.reference is not None for each in counts), len(self._drifted)

    def _add(self, monitored: Monitored, inputs: int, passed: int) -> None:
        counts = self._counts.setdefault(monitored, _Counts())
        self._counts.move_to_end(monitored)
        if len(self._counts) > _MOST_MONITORED:
            removed, _ = self._counts.popitem(last=False)
            self._drifted.discard(removed)
        counts.inputs += inputs
        counts.passed += passed
        if counts.inputs >= self._period:
            self._end_period(monitored, counts)

    def _end_period(self, monitored: Monitored, counts: _Counts) -> None:
        inputs, passed = counts.inputs, counts.passed
        counts.inputs = counts.passed = 0
        if counts.reference is None:
            counts.reference = passed, inputs
            return
        low, high = expected_passes(inputs, *counts.reference)
        counts.last = ClassDrift(
            class_id=monitored[0],
            threshold=monitored[1],
            inputs=inputs,
            pass_share=passed / inputs,
            expected_interval=(low / inputs, high / inputs),
            has_drifted=not low <= passed <= high,
        )
        (self._drifted.add if counts.last.has_drifted else self._drifted.discard)(monitored)
        self._on_period(counts.last)


def expected_passes(inputs: int, passed_before: int, inputs_before: int) -> tuple[int, int]:
    """Return the smallest and the largest number of passes of `inputs` that is not a drift."""
    failed_before = inputs_before - passed_before
    low = _fewest(inputs, passed_before, inputs_before)
    return low, inputs - _fewest(inputs, failed_before, inputs_before)


def _fewest(inputs: int, passed_before: int, inputs_before: int) -> int:
    """Return the smallest number of passes that is not significantly small, by binary search."""
    low, high = 0, inputs
    while low < high:
        middle = (low + high) // 2
        if _tail(middle, inputs, passed_before, inputs_before) > FALSE_ALARMS / 2:
            high = middle
        else:
            low = middle + 1
    return low


def _tail(passed: int, inputs: int, passed_before: int, inputs_before: int) -> float:
    """Return P(X <= passed) if X of the `inputs` pass, given the sum of the passes of both periods:
    the lower tail of a hypergeometric distribution.
    """
    total = passed + passed_before
    values = np.arange(max(0, total - inputs_before), passed + 1)
    logs = np.log(np.arange(1, inputs + inputs_before + 1))
    factorials = np.concatenate([[0.0], np.cumsum(logs)])

    def log_choose(n: int, k: np.ndarray) -> np.ndarray:
        return factorials[n] - factorials[k] - factorials[n - k]

    ways = log_choose(inputs, values) + log_choose(inputs_before, total - values)
    all_ways = log_choose(inputs + inputs_before, np.array(total))
    return float(np.exp(ways - all_ways).sum())
