"""Paper 000, synthetic experiment IV (6.1.5, Figure 5): label vectors of decreasing quality."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.synthetic import BASE, LOSSES, Arm, Regime, draw, is_flat
from experiments.papers.experiments.trained import (
    AUTHORS_BASE,
    NAMES,
    PUBLISHED_DRAWS,
    SHARED,
    Trained,
    advantage,
    claimed,
    edges,
    measure,
    readings,
    search,
    setup,
)
from experiments.papers.intervals import mean, shown
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Kind, Section, Table, agreed, verdict
from heads.tree import build_cover_tree

_CE = Arm("ce")
# In the paper's regime, most trees are flat. In this one, they are not, and accuracy is far from 1.
_REGIME = Regime(n=300, d=8, k=30)
_RATES: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_ARMS = tuple(Arm(loss) for loss in (*LOSSES, "vtree_chains") if loss != "ce")
_MARKS = ("o", "s", "^", "D", "v")


def count_flat_trees(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Count the flat V-trees in the paper's regime, by base of the cover tree (a job)."""
    regimes = [Regime(n=1, tests=1, epsilon=epsilon) for epsilon in settings["epsilons"]]
    vectors = [
        draw(regime, number).label_vectors
        for number in range(settings["draws"])
        for regime in regimes
    ]
    return {
        f"{base:g}": sum(
            is_flat(build_cover_tree(one, base=base, metric="euclidean").vtree()) for one in vectors
        )
        for base in settings["bases"]
    }


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    regime, rates, steps = _REGIME, _RATES, 5 if budget.is_full else 3
    if budget.is_toy:
        regime, rates, steps = Regime(n=3, d=5, k=8, tests=100), SHARED, 2
    # Cross entropy does not use a metric, so one run serves all values of epsilon.
    plain = Trained(regime, [_CE], rates)
    by_epsilon = [
        Trained(replace(regime, epsilon=step / (steps - 1)), _ARMS, rates) for step in range(steps)
    ]
    all_trained = [plain, *by_epsilon]
    counting = Job(
        "experiments.tree_metric:count_flat_trees",
        {
            "draws": 2 if budget.is_toy else PUBLISHED_DRAWS,
            "epsilons": [one.regime.epsilon for one in by_epsilon],
            "bases": [BASE, AUTHORS_BASE],
        },
    )
    flat = yield [counting]
    yield from search(budget, all_trained, draws=2)
    yield from measure(budget, all_trained)
    return _section(plain, by_epsilon, _flat_text(counting, flat[counting].measures), plots)


def _flat_text(counting: Job, flat: Measures) -> str:
    total = counting.settings["draws"] * len(counting.settings["epsilons"])
    counts = " and ".join(
        f"in {count} of {total} cases with base {base}" for base, count in flat.items()
    )
    paper = Regime()
    return (
        f"The paper's regime is n = {paper.n}, d = {paper.d}, k = {paper.k}, sigma = "
        f"{paper.sigma:g}. In this regime, most trees are flat: a single pseudoclass is the "
        "parent of all classes, so the tree loss equals cross entropy for every epsilon. The "
        f"V-tree is flat {counts} (the base in the authors' public code). This experiment "
        "therefore uses a different regime."
    )


def _section(
    plain: Trained, by_epsilon: Sequence[Trained], in_the_paper: str, plots: PlotFolder
) -> Section:
    regime = plain.regime
    plot = plots.save(
        EXPERIMENT.name,
        _figure(plain, by_epsilon),
        title="Test accuracy of averaged weights by epsilon, each loss at its own best rate. "
        "Dashed: cross entropy with its interval.",
        alt_text="One line per loss over epsilon with error bars, and a band for cross entropy.",
    )
    flat = [one.is_cross_entropy(Arm("vtree")) for one in by_epsilon]
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"n = {regime.n}, d = {regime.d}, k = {regime.k}, sigma = {regime.sigma:g}. Trees "
        "and similarities are computed from (1 - epsilon) W + epsilon W', where W' is another "
        "draw. "
        f"{setup([plain, *by_epsilon])}",
        claims=[_claim(plain, by_epsilon[-1], tree) for tree in ("vtree", "vtree_chains")],
        tables=[_accuracies(plain, by_epsilon), _advantages(plain, by_epsilon)],
        plots=[plot],
        remarks=[
            in_the_paper,
            f"In this experiment, {sum(map(sum, flat))} of {sum(map(len, flat))} V-trees are "
            "flat. Synthetic I lists the other differences between the paper and the authors' "
            "public code.",
        ],
    )


def _claim(plain: Trained, worst: Trained, tree: str) -> Claim:
    arm = Arm(tree)
    gaps = {words: advantage((worst, arm), (plain, _CE), read) for words, read in claimed().items()}
    numbers = ", ".join(f"{words} {shown(gap, 4)}" for words, gap in gaps.items())
    return Claim(
        f"synthetic IV: at epsilon = {worst.regime.epsilon:g} the tree loss ({NAMES[tree]}) still "
        "beats cross entropy",
        agreed([verdict(gap) for gap in gaps.values()]),
        f"accuracy difference: {numbers} (paired, {len(worst.draws)} draws)"
        f"{edges([worst], arm)}{edges([plain], _CE)}",
        Kind.PAPER,
    )


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
    return Table("Test accuracy of averaged weights, each loss at its own best rate", header, rows)


def _advantages(plain: Trained, by_epsilon: Sequence[Trained]) -> Table:
    ways = readings()
    rows = [
        [
            f"{one.regime.epsilon:g}, {NAMES[arm.loss]}",
            *(shown(advantage((one, arm), (plain, _CE), read)) for read in ways.values()),
        ]
        for one in by_epsilon
        for arm in _ARMS
    ]
    return Table("Difference from cross entropy, paired by draw", ["epsilon, loss", *ways], rows)


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
    axes.set_xlabel("epsilon (0: the true W, 1: an unrelated draw)")
    axes.set_ylabel("test accuracy")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-metric",
    paper="000",
    title="Synthetic IV: metric quality (Figure 5)",
    minutes=1.5,
    full="as many draws of W as in the paper, with more values of epsilon",
    procedure=_procedure,
)
