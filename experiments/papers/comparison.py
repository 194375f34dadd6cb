"""Fair comparison of losses: each gets the same learning-rate search, then several seeds.

The seeds run at the rates found by the search and at shared rates.
"""

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from experiments.papers.budget import Budget
from experiments.papers.edges import edge_note, is_at_edge
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Job, Measures, Results
from experiments.papers.section import Claim, Kind, agreed, paired
from experiments.papers.shards import Dataset
from experiments.papers.training import training


@dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay, which a search chooses for each loss."""

    lr: float
    weight_decay: float

    def text(self) -> str:
        return f"{self.lr:g}, {self.weight_decay:g}"

    def optimizer(self, **settings: Any) -> dict[str, Any]:
        """Return the recipe's optimizer section: SGD with momentum 0.9 at these rates."""
        return {"kind": "sgd", "lr": self.lr, "weight_decay": self.weight_decay, **settings}


def grid(lrs: Sequence[float], weight_decays: Sequence[float]) -> tuple[Rates, ...]:
    """Return every combination of a learning rate and a weight decay."""
    return tuple(Rates(lr, decay) for lr, decay in itertools.product(lrs, weight_decays))


@dataclass(frozen=True)
class Run:
    """One training run; `split` is the split that it evaluates."""

    arm: str
    rates: Rates
    steps: int
    seed: int
    split: str


class Design(Protocol):
    """The dataset and the recipe of each arm of a comparison."""

    def dataset(self, arm: str) -> Dataset:
        """Return a dataset with the splits `validation`, used to choose the rates, and `test`."""
        ...

    def recipe(self, run: Run) -> Mapping[str, Any]:
        """Return the recipe as a dictionary without `run` and `data.shards`."""
        ...


@dataclass(frozen=True)
class Comparison:
    """Compare `arms`, usually losses, each at the rates of its own search and at `shared` rates.

    For each of `measures`, the search chooses the candidate with the highest value on `validation`.
    Claims about other measures use the rates chosen by the first of `measures`. With `refine`, the
    search by the first measure continues from the best candidate in half-decade steps until the
    learning rates on both sides of the best one are worse. `also` lists additional splits to
    evaluate. `all_logits` lists the arms whose log-probabilities are also measured.
    """

    design: Design
    arms: Sequence[str]
    candidates: Sequence[Rates]
    shared: Rates
    measures: Sequence[str]
    refine: bool = False
    also: Sequence[str] = ()
    all_logits: Sequence[str] = ()

    def procedure(
        self, budget: Budget, *, steps: int, search_steps: int, at_least: int = 3, at_most: int = 10
    ) -> Generator[Sequence[Job], Results, "Compared"]:
        """Make the shards, search the rates, then run one seed of every arm per round."""
        shards = yield list({self.design.dataset(arm).job for arm in self.arms})
        candidates = [self.shared] if budget.is_toy else self.candidates
        search = _Search(self, search_steps)
        yield from search.try_all(dict.fromkeys(self.arms, candidates))
        chosen = {measure: search.chosen(measure) for measure in self.measures}
        bracketed = []
        if self.refine and not budget.is_toy:
            yield from search.bracket(self.measures[0])
            bracketed = [search.chosen(self.measures[0])]
        searched = [*chosen.values(), *bracketed]
        rates = {
            arm: dict.fromkeys([*(best[arm].rates for best in searched), self.shared])
            for arm in self.arms
        }
        results: Results = {}
        seeds = []
        for number in budget.rounds(at_least=at_least, at_most=at_most):
            seeds.append(number + 1)  # the search used seed 0
            results |= yield [
                self._measured(arm, each, steps, seeds[-1])
                for arm in self.arms
                for each in rates[arm]
            ]

        def runs(arm: str, rates: Rates) -> list[Measures]:
            jobs = [self._measured(arm, rates, steps, seed) for seed in seeds]
            return [results[job].measures for job in jobs]

        def at(best: Mapping[str, Best]) -> Reached:
            return Reached(best, {arm: runs(arm, one.rates) for arm, one in best.items()})

        return Compared(
            steps=steps,
            search_steps=search_steps,
            num_candidates=len(candidates),
            seeds=len(seeds),
            samples={arm: shards[self.design.dataset(arm).job].measures for arm in self.arms},
            shared=self.shared,
            by={measure: at(best) for measure, best in chosen.items()},
            refined=at(bracketed[0]) if bracketed else None,
            at_shared={arm: runs(arm, self.shared) for arm in self.arms},
        )

    def tried(self, arm: str, rates: Rates, steps: int) -> Job:
        """Return the job of one run of the search."""
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


@dataclass(frozen=True)
class Best:
    """The rates that a search chose.

    `at_edge`: the learning rate is the smallest or largest one tried, so a better one may lie
    outside the grid.
    """

    rates: Rates
    at_edge: bool

    def text(self) -> str:
        return f"{self.rates.text()} (edge)" if self.at_edge else self.rates.text()


class _Search:
    """The results of every arm at the rates tried so far."""

    def __init__(self, comparison: Comparison, steps: int) -> None:
        self._comparison, self._steps = comparison, steps
        self._reached: dict[str, dict[Rates, Measures]] = {arm: {} for arm in comparison.arms}

    def try_all(
        self, wanted: Mapping[str, Sequence[Rates]]
    ) -> Generator[Sequence[Job], Results, None]:
        jobs = {
            (arm, rates): self._comparison.tried(arm, rates, self._steps)
            for arm, of_arm in wanted.items()
            for rates in of_arm
        }
        results = yield list(jobs.values())
        for (arm, rates), job in jobs.items():
            self._reached[arm][rates] = results[job].measures

    def bracket(self, measure: str) -> Generator[Sequence[Job], Results, None]:
        """Try learning rates half a decade above and below each arm's best one.

        Stop when neither is better, or after `_MOST_EXTENSIONS` extensions.
        """
        for _ in range(_MOST_EXTENSIONS):
            best = self.chosen(measure)
            missing = {
                arm: [one for one in half_decades(best[arm].rates) if one not in reached]
                for arm, reached in self._reached.items()
            }
            if not any(missing.values()):
                return
            yield from self.try_all(missing)

    def chosen(self, measure: str) -> dict[str, Best]:
        return {arm: self._best(arm, measure) for arm in self._reached}

    def _best(self, arm: str, measure: str) -> Best:
        """Return the first of the best rates. A run that diverged is worse than any other."""

        def reached(rates: Rates) -> float:
            measures = self._reached[arm][rates]
            return -1.0 if "diverged" in measures else float(measures[measure])

        best = max(self._reached[arm], key=reached)
        return Best(best, is_at_edge(best.lr, [rates.lr for rates in self._reached[arm]]))


_MOST_EXTENSIONS = 4


def half_decades(rates: Rates) -> list[Rates]:
    """Return the rates with learning rates half a decade below and above.

    They are rounded to three digits, so that two half decades above 0.1 is exactly 1.
    """
    exponent = round(2 * math.log10(rates.lr))
    lrs = (float(f"{10 ** (near / 2):.3g}") for near in (exponent - 1, exponent + 1))
    return [Rates(lr, rates.weight_decay) for lr in lrs]


@dataclass(frozen=True)
class Reached:
    """The results of every arm at the rates that a search chose: one set of measures per seed."""

    chosen: Mapping[str, Best]
    runs: Mapping[str, list[Measures]]

    def edges(self, *arms: str) -> str:
        """Return the note on best rates at a grid edge for a claim about `arms` (default: all)."""
        chosen = {arm: self.chosen[arm] for arm in arms or self.chosen}
        return edge_note(
            [f"{arm} ({one.rates.lr:g})" for arm, one in chosen.items() if one.at_edge]
        )


@dataclass(frozen=True)
class Compared:
    """Results of every arm at the rates chosen by each measure, at those of the bracketed search
    if there was one (`refined`), and at the `shared` rates."""

    steps: int
    search_steps: int
    num_candidates: int
    seeds: int
    samples: Mapping[str, Measures]
    shared: Rates
    by: Mapping[str, Reached]
    refined: Reached | None
    at_shared: Mapping[str, list[Measures]]

    @property
    def best(self) -> Reached:
        """Results at the rates chosen by the first measure."""
        return next(iter(self.by.values()))

    @property
    def at_best(self) -> Mapping[str, list[Measures]]:
        return self.best.runs

    def readings(self) -> dict[str, Reached]:
        """Return, by name, the results of each search for which a claim is evaluated."""
        if self.refined is None:
            return {"grid": self.best}
        return {"grid": self.best, "bracketed": self.refined}

    def judge(
        self,
        statement: str,
        gain: Callable[[Reached], Mean],
        arms: Sequence[str],
        kind: Kind,
        *,
        points: bool = False,
    ) -> Claim:
        """Return the claim that `gain`, a mean paired by seed, is positive for every search."""
        claims = {
            name: paired(statement, gain(reached), kind, points=points, note=reached.edges(*arms))
            for name, reached in self.readings().items()
        }
        evidence = [
            f"{name}: {claim.evidence}" if self.refined else claim.evidence
            for name, claim in claims.items()
        ]
        verdicts = [claim.verdict for claim in claims.values()]
        return Claim(statement, agreed(verdicts), ". ".join(evidence), kind)

    def setup(self) -> str:
        """Return a description of the comparison for the page."""
        *first, last = self.by
        measures = f"{', '.join(first)} or {last}" if first else last
        found = (
            f"Each run takes {self.steps:,} steps, and there are {self.seeds} seeds. For each "
            f"loss, the best of the same {self.num_candidates} pairs of learning rate and weight "
            f"decay is chosen by {measures} on held-out training samples after "
            f"{self.search_steps:,} steps{self.best.edges()}. The shared learning rate is "
            f"{self.shared.lr:g}, and the shared weight decay is {self.shared.weight_decay:g}."
        )
        if self.refined is None:
            return found
        return (
            f"{found} Starting from the best candidate, a bracketed search then moves in "
            "half-decade steps until the rates on both sides of the best one are worse"
            f"{self.refined.edges()}."
        )


def values(runs: Sequence[Measures], measure: str, *, diverged: float) -> list[float]:
    """Return a measure of each run (`split/measure` for another split).

    `diverged`: the value to use for a run that diverged.
    """
    return [diverged if "diverged" in run else float(_at(run, measure)) for run in runs]


def mean_of(runs: Sequence[Measures], measure: str, *, diverged: float = 0.0) -> Mean:
    """Return the mean of a measure over seeds."""
    return mean(values(runs, measure, diverged=diverged))


def cell(runs: Sequence[Measures], measure: str, form: Callable[[Mean], str]) -> str:
    """Return a table cell: the mean of a measure, or how many runs diverged."""
    if diverged := sum("diverged" in run for run in runs):
        return f"diverged ({diverged} of {len(runs)})"
    return form(mean_of(runs, measure))


def advantage(
    ours: Sequence[Measures], theirs: Sequence[Measures], measure: str, *, diverged: float = 0.0
) -> Mean:
    """Return the difference `ours` minus `theirs` in a measure, paired by seed."""
    return difference(
        values(ours, measure, diverged=diverged), values(theirs, measure, diverged=diverged)
    )


def _at(run: Measures, measure: str) -> Any:
    found: Any = run
    for key in measure.split("/"):
        found = found[key]
    return found
