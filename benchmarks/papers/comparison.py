"""Losses compared fairly: the same search for the rates of each, then seeds at what it found and at
the rate that all share."""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.papers.budget import Budget
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Results
from benchmarks.papers.shards import Dataset
from benchmarks.papers.training import training


@dataclass(frozen=True)
class Rates:
    """What a search chooses for a loss."""

    lr: float
    weight_decay: float

    def text(self) -> str:
        return f"{self.lr:g}, {self.weight_decay:g}"

    def optimizer(self, **settings: Any) -> dict[str, Any]:
        """SGD with momentum 0.9 at these rates, as a recipe has it."""
        return {"kind": "sgd", "lr": self.lr, "weight_decay": self.weight_decay, **settings}


def grid(lrs: Sequence[float], weight_decays: Sequence[float]) -> tuple[Rates, ...]:
    """Every learning rate with every weight decay."""
    return tuple(Rates(lr, decay) for lr, decay in itertools.product(lrs, weight_decays))


@dataclass(frozen=True)
class Run:
    """What a recipe is made for: `split` is what it evaluates."""

    arm: str
    rates: Rates
    steps: int
    seed: int
    split: str


class Design(Protocol):
    """What a comparison needs to know of its arms."""

    def dataset(self, arm: str) -> Dataset:
        """With a split `validation`, by which rates are chosen, and `test`."""
        ...

    def recipe(self, run: Run) -> Mapping[str, Any]:
        """A recipe's tree without `run` and `data.shards`."""
        ...


@dataclass(frozen=True)
class Comparison:
    """`arms`, usually losses. The candidate with the highest `measure` on `validation` is the best.

    `also` are further splits to evaluate, `all_logits` the arms of which the measures of
    log-probabilities are taken, too.
    """

    design: Design
    arms: Sequence[str]
    candidates: Sequence[Rates]
    shared: Rates
    measure: str = "top1"
    also: Sequence[str] = ()
    all_logits: Sequence[str] = ()

    def course(
        self, budget: Budget, *, steps: int, search_steps: int, at_least: int = 3, at_most: int = 10
    ) -> Generator[Sequence[Job], Results, "Compared"]:
        """Runs it: shards, search, then a seed of every arm at a time while the budget lasts."""
        shards = yield list({self.design.dataset(arm).job for arm in self.arms})
        candidates = [self.shared] if budget.is_toy else self.candidates
        found = yield [
            self._tried(arm, rates, search_steps) for arm in self.arms for rates in candidates
        ]
        best = {arm: self._best(arm, candidates, search_steps, found) for arm in self.arms}
        results: Results = {}
        seeds = []
        for number in budget.rounds(at_least=at_least, at_most=at_most):
            seeds.append(number + 1)  # the search had seed 0
            results |= yield [
                self._measured(arm, rates, steps, seeds[-1])
                for arm in self.arms
                for rates in (best[arm], self.shared)
            ]

        def runs(arm: str, rates: Rates) -> list[Measures]:
            jobs = [self._measured(arm, rates, steps, seed) for seed in seeds]
            return [results[job].measures for job in jobs]

        return Compared(
            steps=steps,
            search_steps=search_steps,
            num_candidates=len(candidates),
            seeds=len(seeds),
            samples={arm: shards[self.design.dataset(arm).job].measures for arm in self.arms},
            rates=best,
            shared=self.shared,
            measure=self.measure,
            at_best={arm: runs(arm, best[arm]) for arm in self.arms},
            at_shared={arm: runs(arm, self.shared) for arm in self.arms},
        )

    def _tried(self, arm: str, rates: Rates, steps: int) -> Job:
        run = Run(arm, rates, steps, seed=0, split="validation")
        return training(self.design.dataset(arm), self.design.recipe(run))

    def _measured(self, arm: str, rates: Rates, steps: int, seed: int) -> Job:
        run = Run(arm, rates, steps, seed, split="test")
        return training(
            self.design.dataset(arm),
            self.design.recipe(run),
            also=self.also,
            logits=arm in self.all_logits,
        )

    def _best(self, arm: str, candidates: Sequence[Rates], steps: int, results: Results) -> Rates:
        """The first of equals; one that diverged counts as nothing."""

        def reached(rates: Rates) -> float:
            measures = results[self._tried(arm, rates, steps)].measures
            return -1.0 if "diverged" in measures else float(measures[self.measure])

        return max(candidates, key=reached)


@dataclass(frozen=True)
class Compared:
    """Measures of every arm, one a seed, at the `rates` of its own and at the `shared` ones."""

    steps: int
    search_steps: int
    num_candidates: int
    seeds: int
    samples: Mapping[str, Measures]
    rates: Mapping[str, Rates]
    shared: Rates
    measure: str
    at_best: Mapping[str, list[Measures]]
    at_shared: Mapping[str, list[Measures]]

    def setup(self) -> str:
        """How it was compared, in words for the page."""
        return (
            f"{self.steps:,} steps, {self.seeds} seeds. Learning rate and weight decay of each: "
            f"the best of the same {self.num_candidates} candidates after {self.search_steps:,} "
            f"steps, by {self.measure} on held-out training samples; shared: {self.shared.text()}."
        )


def values(runs: Sequence[Measures], measure: str, *, diverged: float) -> list[float]:
    """A measure of each run (`split/measure` of another split); `diverged` for one that did."""
    return [diverged if "diverged" in run else float(_at(run, measure)) for run in runs]


def mean_of(runs: Sequence[Measures], measure: str, *, diverged: float = 0.0) -> Mean:
    """The mean of a measure over seeds."""
    return mean(values(runs, measure, diverged=diverged))


def cell(runs: Sequence[Measures], measure: str, form: Callable[[Mean], str]) -> str:
    """The mean of a measure for a table; or how many runs diverged, of which there is none."""
    if diverged := sum("diverged" in run for run in runs):
        return f"diverged ({diverged} of {len(runs)})"
    return form(mean_of(runs, measure))


def advantage(
    ours: Sequence[Measures], theirs: Sequence[Measures], measure: str, *, diverged: float = 0.0
) -> Mean:
    """By how much a measure of ours is higher, paired by seed."""
    return difference(
        values(ours, measure, diverged=diverged), values(theirs, measure, diverged=diverged)
    )


def _at(run: Measures, measure: str) -> Any:
    found: Any = run
    for key in measure.split("/"):
        found = found[key]
    return found
