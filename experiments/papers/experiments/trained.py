"""Train arms on paper 000's synthetic data, draw by draw, and compare them.

The paper states neither the learning rates nor the number of passes. Each arm is trained at the
best learning rate of its own search and at the `SHARED` rates, and a claim is settled only if the
results at all of these rates agree. If the tree of a tree loss is flat, cross entropy would be
compared with itself, so such draws are omitted.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from data.messages import pluralize
from experiments.papers.budget import Budget
from experiments.papers.edges import edge_note, is_at_edge
from experiments.papers.experiments.synthetic import BASE, Arm, Regime
from experiments.papers.intervals import Mean, mean
from experiments.papers.job import Job, Measures, Results

# The theory suggests a rate of ||W|| / (||x|| sqrt n), which is 0.2 for the paper's baseline. On a
# path of many nodes, a step moves a row a few times as far as without a tree, so neighboring rates
# in the grid must not differ by more than that factor.
RATES: Sequence[float] = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SHARED: Sequence[float] = (0.01, 0.1)
AUTHORS_BASE = 2.0

# github.com/cora1021/TreeLoss, run_exp.py and base_exp.py.
AUTHORS_CODE = (
    "The authors' public code (cora1021/TreeLoss) differs from the paper's text or fills gaps in "
    "it. It trains from random weights with one pass of single-sample SGD (rate 1e-4, momentum "
    f"0.9, weight decay 3e-4), uses cover trees of base {AUTHORS_BASE:g}, and draws a W* of rank "
    "5, where the text uses independent entries. Its pseudoclasses are keyed by center, so a path "
    "can contain the same vector twice. By default, its script for Figure 4 takes a single step on "
    "1,000 samples. None of this is used here."
)

PUBLISHED_DRAWS = 50
_LEAST_DRAWS = 3

NAMES = {
    "vtree": "V-tree",
    "utree": "U-tree",
    "ce": "cross entropy",
    "simloss": "SimLoss",
    "hierarchical_softmax": "hierarchical softmax",
    "vtree_chains": "V-tree with chains",
}


@dataclass
class Trained:
    """The results of `arms` in a regime, draw by draw.

    Each arm is trained at the best of `rates` (searched on separate draws), at the `SHARED` rates
    and at the rates in `also`.
    """

    regime: Regime
    arms: Sequence[Arm]
    rates: Sequence[float] = RATES
    searched: list[Measures] = field(default_factory=list)
    draws: list[Measures] = field(default_factory=list)
    also: Sequence[float] = ()

    def search(self, number: int) -> Job:
        """Return the job that trains all arms at all rates on draw `number`."""
        return self._job(number, dict.fromkeys(self.arms, self.rates))

    def job(self, number: int) -> Job:
        """Return the job that trains all arms on draw `number` at the chosen rates."""
        chosen = {}
        for arm in self.arms:
            own = {self.own_rate(arm, measure) for measure in ("averaged", "last")}
            chosen[arm] = sorted({*own, *SHARED, *self.also})
        return self._job(number, chosen)

    def _job(self, number: int, rates: Mapping[Arm, Sequence[float]]) -> Job:
        settings = {
            "regime": asdict(self.regime),
            "arms": [{**asdict(arm), "rates": list(rates[arm])} for arm in self.arms],
            "draw": number,
        }
        return Job("experiments.synthetic:train_arms", settings)

    def bayes(self) -> Mean:
        """Return the accuracy of the Bayes-optimal classifier."""
        return mean([found["bayes"] for found in self.draws])

    def at(self, arm: Arm, rate: float, measure: str = "averaged") -> list[float]:
        """Return a measure for each draw at one learning rate."""
        return self._of(self.draws, arm, rate, measure)

    def searched_at(self, arm: Arm, rate: float, measure: str = "averaged") -> list[float]:
        """Return a measure for each draw of the search at one learning rate."""
        return self._of(self.searched, arm, rate, measure)

    def _of(self, draws: Sequence[Measures], arm: Arm, rate: float, measure: str) -> list[float]:
        index = self.arms.index(arm)
        return [float(found["arms"][index]["runs"][f"{rate:g}"][measure]) for found in draws]

    def at_own(self, arm: Arm, measure: str = "averaged") -> list[float]:
        """Return the accuracy for each draw at the arm's own best learning rate."""
        return self.at(arm, self.own_rate(arm, measure), measure)

    def own_rate(self, arm: Arm, measure: str = "averaged") -> float:
        """Return the best learning rate over the draws of the search."""
        return max(self.rates, key=lambda rate: sum(self.searched_at(arm, rate, measure)))

    def has_edge(self, arm: Arm, measure: str = "averaged") -> bool:
        """Return whether the arm's best learning rate is at an edge of the grid."""
        return is_at_edge(self.own_rate(arm, measure), self.rates)

    def is_cross_entropy(self, arm: Arm) -> list[bool]:
        """Return for each draw whether the arm is equivalent to cross entropy."""
        index = self.arms.index(arm)
        return [bool(found["arms"][index]["is_cross_entropy"]) for found in self.draws]

    def advantage(self, ours: Arm, theirs: Arm, read: "Reading") -> Mean | None:
        """Return the advantage of `ours`, paired by draw; None if every draw is degenerate."""
        return _mean_of(gaps((self, ours), (self, theirs), read))

    def pseudoclasses(self, arm: Arm) -> list[int]:
        """Return the number of inner nodes of the arm's tree in each draw."""
        index = self.arms.index(arm)
        return [int(found["arms"][index]["nodes"]) - self.regime.k for found in self.draws]

    def depth(self, arm: Arm) -> Mean:
        """Return the mean number of nodes above a class."""
        index = self.arms.index(arm)
        return mean([float(found["arms"][index]["depth"]) for found in self.draws])


# Accuracies of an arm, draw by draw.
Reading = Callable[[Trained, Arm], list[float]]


def own(measure: str = "averaged") -> Reading:
    """Return the reading in which each arm has its own best learning rate."""
    return lambda trained, arm: trained.at_own(arm, measure)


def shared(rate: float, measure: str = "averaged") -> Reading:
    """Return the reading in which all arms have the same learning rate."""
    return lambda trained, arm: trained.at(arm, rate, measure)


def readings() -> dict[str, Reading]:
    """Return all ways to compare arms, by description."""
    return {
        "own best rates, averaged": own(),
        "own best rates, final weights": own("last"),
        **{f"all at rate {rate:g}, averaged": shared(rate) for rate in SHARED},
        **{f"all at rate {rate:g}, final weights": shared(rate, "last") for rate in SHARED},
    }


def claimed() -> dict[str, Reading]:
    """Return the readings that decide a claim. The paper states no rates, so all must agree."""
    return {
        "own best rates": own(),
        **{f"all at rate {rate:g}": shared(rate) for rate in SHARED},
    }


def gaps(ours: tuple[Trained, Arm], theirs: tuple[Trained, Arm], read: Reading) -> dict[int, float]:
    """Return `ours` minus `theirs` by draw. Both must have the same draws.

    Degenerate draws, in which both sides are cross entropy, are omitted.
    """
    flat = (trained.is_cross_entropy(arm) for trained, arm in (ours, theirs))
    both_flat = [all(of_draw) for of_draw in zip(*flat, strict=True)]
    all_gaps = [a - b for a, b in zip(read(*ours), read(*theirs), strict=True)]
    return {
        draw: gap
        for draw, (gap, same) in enumerate(zip(all_gaps, both_flat, strict=True))
        if not same
    }


def advantage(ours: tuple[Trained, Arm], theirs: tuple[Trained, Arm], read: Reading) -> Mean | None:
    """Return the mean of `gaps`; None if every draw is degenerate."""
    return _mean_of(gaps(ours, theirs, read))


def pooled(regimes: Sequence[Trained], ours: Arm, theirs: Arm, read: Reading) -> Mean | None:
    """Return the mean advantage over regimes, paired by draw. Degenerate draws are excluded."""
    by_draw: dict[int, list[float]] = {}
    for one in regimes:
        for draw, gap in gaps((one, ours), (one, theirs), read).items():
            by_draw.setdefault(draw, []).append(gap)
    return _mean_of({draw: float(np.mean(of_draw)) for draw, of_draw in by_draw.items()})


def _mean_of(by_draw: Mapping[int, float]) -> Mean | None:
    return mean(list(by_draw.values())) if by_draw else None


def edges(regimes: Sequence[Trained], *arms: Arm) -> str:
    """Return the note on best rates at an edge of the grid for a claim about `arms`."""
    found = []
    for arm in arms:
        rates = [one.own_rate(arm) for one in regimes if arm in one.arms and one.has_edge(arm)]
        if rates:
            where = f" in {len(rates)} of {len(regimes)} regimes" if len(regimes) > 1 else ""
            shown = ", ".join(f"{rate:g}" for rate in sorted(set(rates)))
            found.append(f"{arm_text(arm)}{where} ({shown})")
    return edge_note(found)


def arm_text(arm: Arm) -> str:
    """Return the name of an arm for the page, with its base if it differs from the default."""
    return NAMES[arm.loss] + ("" if arm.base == BASE else f", base {arm.base:g}")


def search(
    budget: Budget, all_trained: Sequence[Trained], *, draws: int
) -> Generator[Sequence[Job], Results, None]:
    """Search the rates of all arms on the first `draws` draws."""
    numbers = range(1 if budget.is_toy else draws)
    results = yield [one.search(number) for one in all_trained for number in numbers]
    for one in all_trained:
        one.searched += [results[one.search(number)].measures for number in numbers]


def measure(
    budget: Budget, all_trained: Sequence[Trained], *, together: int = 1
) -> Generator[Sequence[Job], Results, None]:
    """Measure all arms on more draws while the budget lasts, `together` draws per round."""
    first, rounds = len(all_trained[0].searched), PUBLISHED_DRAWS // together
    at_least = rounds if budget.is_full else -(-_LEAST_DRAWS // together)
    for number in budget.rounds(at_least=at_least, at_most=rounds):
        numbers = range(first + number * together, first + (number + 1) * together)
        results = yield [one.job(draw) for one in all_trained for draw in numbers]
        for one in all_trained:
            one.draws += [results[one.job(draw)].measures for draw in numbers]


def setup(regimes: Sequence[Trained]) -> str:
    """Return a description of the training for the page."""
    one = regimes[0]
    rates = ", ".join(f"{rate:g}" for rate in one.rates)
    own = [regime.own_rate(arm) for regime in regimes for arm in regime.arms]
    at_edge = sum(regime.has_edge(arm) for regime in regimes for arm in regime.arms)
    return (
        f"W is drawn {len(one.draws)} times, with {one.regime.tests:,} test samples per draw. "
        "kway's heads have no bias, are initialized to zero and are trained for one pass of "
        "single-sample SGD at a constant rate (the paper states neither the rate nor the number of "
        "passes). Both the average of the weights over the steps and the final weights are tested. "
        "Cover trees use Euclidean distances between label vectors. For each loss, the best of the "
        f"rates {rates} is chosen on {pluralize(len(one.searched), 'separate draw')}, once for the "
        f"averaged and once for the final weights. In {at_edge} of {len(own)} cases, the "
        "chosen rate is the smallest or the largest one."
    )
