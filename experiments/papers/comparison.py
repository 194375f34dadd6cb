"""Fair comparison of losses: each gets its own learning-rate search, then all run with the same
seeds."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Job, Measures, Result, Results
from experiments.papers.section import Claim, paired

Arm = TypeVar("Arm")
# The value of a measure for a run that diverged. It is below every accuracy and average precision.
DIVERGED = 0.0


def search(
    arms: Sequence[Arm],
    jobs: Callable[[Arm, Sequence[float]], Sequence[Job]],
    read: Callable[[Sequence[Result]], Sequence[float]],
    *,
    rates: Sequence[float],
    limits: tuple[float, float],
) -> Generator[Sequence[Job], Results, dict[Arm, dict[float, float]]]:
    """Search the rate of each arm. Return the value of each rate tried, higher is better.

    `jobs` returns the jobs that measure some rates, and `read` the values of these rates. Rates are
    added until the best one has a worse one on each side, or a limit is reached.
    """
    found: dict[Arm, dict[float, float]] = {arm: {} for arm in arms}
    wanted: dict[Arm, list[float]] = {arm: list(rates) for arm in arms}
    while wanted:
        of_arms = {arm: jobs(arm, of_arm) for arm, of_arm in wanted.items()}
        results = yield [job for of_arm in of_arms.values() for job in of_arm]
        for arm, of_arm in of_arms.items():
            values = read([results[job] for job in of_arm])
            found[arm] |= dict(zip(wanted[arm], values, strict=True))
        wanted = {arm: more for arm in wanted if (more := more_rates(found[arm], limits))}
    return found


def more_rates(searched: Mapping[float, float], limits: tuple[float, float]) -> list[float]:
    """Return the rates to add to a search: none if the best one has a worse one on each side or is
    at a limit. searched: value by rate."""
    best = max(searched, key=searched.__getitem__)
    if best == min(searched) and best > limits[0]:
        return [float(f"{best / 10 ** (step / 2):.2g}") for step in (1, 2)]
    if best == max(searched) and best < limits[1]:
        return [float(f"{best * 10 ** (step / 2):.2g}") for step in (1, 2)]
    return []


@dataclass(frozen=True)
class Compared(Generic[Arm]):
    """The searched rates of each arm with their values, and the measures of its runs by seed."""

    searched: Mapping[Arm, Mapping[float, float]]
    runs: Mapping[Arm, Sequence[Measures]]

    def rate(self, arm: Arm) -> float:
        """Return the best rate."""
        return best_rate(self.searched[arm])

    def is_at_edge(self, arm: Arm) -> bool:
        """Return whether the best rate is the lowest or the highest one that was tried."""
        return self.rate(arm) in (min(self.searched[arm]), max(self.searched[arm]))

    def values(self, arm: Arm, measure: str) -> list[float]:
        """Return a measure (`split/measure` for another split) by seed."""
        return [_at(run, measure) for run in self.runs[arm]]

    def mean(self, arm: Arm, measure: str) -> Mean:
        return mean(self.values(arm, measure))

    def gain(self, ours: Arm, theirs: Arm, measure: str, *, of_theirs: str = "") -> Mean:
        """Return the difference `ours` minus `theirs`, paired by seed. `of_theirs`: another measure
        for `theirs`."""
        return difference(self.values(ours, measure), self.values(theirs, of_theirs or measure))

    def claim(self, statement: str, gain: Mean, *arms: Arm, points: bool = False) -> Claim:
        """Return the claim that `gain` is positive. If the best rate of one of `arms` is the lowest
        or highest one that was tried, the evidence says so, because a better one may lie outside.
        """
        edges = [
            f"{arm} ({self.rate(arm):g})"
            for arm in arms
            if len(self.searched[arm]) > 1 and self.is_at_edge(arm)
        ]
        note = f"; the best rate is at an edge of the search for {', '.join(edges)}"
        return paired(statement, gain, points=points, note=note if edges else "")


def mean_accuracies(results: Sequence[Result]) -> list[float]:
    """Read the mean over draws of each rate, from the result of a single job."""
    (result,) = results
    return [mean(of_rate).value for of_rate in result["accuracy"]]


def best_rate(searched: Mapping[float, float]) -> float:
    return max(searched, key=searched.__getitem__)


def _at(run: Measures, measure: str) -> float:
    found: Any = run
    if "diverged" in run:
        return DIVERGED
    for key in [measure] if measure in run else measure.split("/"):
        found = found[key]
    return DIVERGED if found is None else float(found)
