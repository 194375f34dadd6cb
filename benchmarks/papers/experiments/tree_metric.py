"""Paper 000, synthetic experiment IV (6.1.5, Figure 5): label vectors that say less and less."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.synthetic import (
    LOSSES,
    NAMES,
    RATES,
    SHARED,
    Arm,
    Reading,
    Regime,
    Trained,
    measure,
    own,
    readings,
    search,
    setup,
    shared,
)
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.section import Claim, Section, Table, verdict

_CE = Arm("ce")
_ARMS = tuple(Arm(loss) for loss in (*LOSSES, "vtree_chains") if loss != "ce")
_MARKS = ("o", "s", "^", "D", "v")


def _course(budget: Budget, album: Album) -> Course:
    regime, rates, steps = Regime(), RATES, 5 if budget.is_full else 3
    if budget.is_toy:
        regime, rates, steps = Regime(n=3, d=5, k=8, tests=100), SHARED, 2
    # Cross entropy asks no metric: once is enough.
    plain = Trained(regime, [_CE], rates)
    by_epsilon = [
        Trained(replace(regime, epsilon=step / (steps - 1)), _ARMS, rates) for step in range(steps)
    ]
    everyone = [plain, *by_epsilon]
    yield from search(budget, everyone, draws=4)
    yield from measure(budget, everyone)
    return _section(plain, by_epsilon, album)


def _section(plain: Trained, by_epsilon: Sequence[Trained], album: Album) -> Section:
    regime = plain.regime
    picture = album.add(
        EXPERIMENT.name,
        _figure(plain, by_epsilon),
        title="Test accuracy by epsilon, averaged weights, each at its own best rate; dashed: "
        "cross entropy with its interval.",
        words="A line with intervals for each loss over epsilon, and a band of cross entropy.",
    )
    trees = [one.pseudoclasses(Arm("vtree")) for one in by_epsilon]
    stars = sum(count == 1 for of_epsilon in trees for count in of_epsilon)
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"n = {regime.n}, d = {regime.d}, k = {regime.k}, sigma = {regime.sigma:g}; trees "
        f"and similarities of (1 - epsilon) W + epsilon W'. {setup([plain])}",
        claims=[
            _claim(plain, by_epsilon[-1], tree, words, read)
            for tree in ("vtree", "vtree_chains")
            for words, read in (
                ("each at its own best rate", own()),
                *((f"all at rate {rate:g}", shared(rate)) for rate in SHARED),
            )
        ],
        tables=[_accuracies(plain, by_epsilon), _advantages(plain, by_epsilon)],
        pictures=[picture],
        remarks=[
            f"In {stars} of {sum(map(len, trees))} trees one pseudoclass is above all classes, "
            "and the V-tree is the cross entropy itself, whatever epsilon is.",
        ],
    )


def _claim(plain: Trained, worst: Trained, tree: str, words: str, read: Reading) -> Claim:
    ours = _advantage(plain, worst, Arm(tree), read)
    return Claim(
        f"synthetic IV: at epsilon = {worst.regime.epsilon:g} the tree loss ({NAMES[tree]}) still "
        f"beats cross entropy, {words}",
        verdict(ours),
        f"{ours.text(4)} accuracy (paired, {ours.n} draws)",
    )


def _advantage(plain: Trained, one: Trained, arm: Arm, read: Reading) -> Mean:
    return difference(read(one, arm), read(plain, _CE))


def _accuracies(plain: Trained, by_epsilon: Sequence[Trained]) -> Table:
    rows = [
        [
            f"{one.regime.epsilon:g}",
            *(mean(one.at_own(arm)).text() for arm in _ARMS),
            mean(plain.at_own(_CE)).text(),
        ]
        for one in by_epsilon
    ]
    header = ["epsilon", *(NAMES[arm.loss] for arm in (*_ARMS, _CE))]
    return Table("Test accuracy, averaged weights, each at its own best rate", header, rows)


def _advantages(plain: Trained, by_epsilon: Sequence[Trained]) -> Table:
    ways = readings()
    rows = [
        [
            f"{one.regime.epsilon:g}, {NAMES[arm.loss]}",
            *(_advantage(plain, one, arm, read).text() for read in ways.values()),
        ]
        for one in by_epsilon
        for arm in _ARMS
    ]
    return Table("Minus cross entropy, paired by draw", ["epsilon, loss", *ways], rows)


def _figure(plain: Trained, by_epsilon: Sequence[Trained]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    level = mean(plain.at_own(_CE))
    axes.axhspan(level.low, level.high, color="0.9")
    axes.axhline(level.value, color="black", linestyle="--", label=NAMES["ce"])
    for number, arm in enumerate(_ARMS):
        found = [mean(one.at_own(arm)) for one in by_epsilon]
        axes.errorbar(
            [one.regime.epsilon + 0.01 * (number - 2) for one in by_epsilon],
            [one.value for one in found],
            yerr=[one.half for one in found],
            marker=_MARKS[number],
            capsize=3,
            label=NAMES[arm.loss],
        )
    axes.set_xlabel("epsilon: 0 the true W, 1 another one")
    axes.set_ylabel("test accuracy")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-metric",
    paper="000",
    title="Synthetic IV: metric quality (Figure 5)",
    minutes=1.5,
    full="as many draws of W as the paper, at more values of epsilon",
    course=_course,
)
