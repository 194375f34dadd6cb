"""Paper 000, synthetic experiment III (6.1.4, Figure 4): accuracy by the cover tree's base."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.synthetic import BASE, Arm, Regime
from experiments.papers.experiments.trained import (
    AUTHORS_BASE,
    NAMES,
    SHARED,
    Reading,
    Trained,
    claimed,
    edges,
    measure,
    readings,
    search,
    setup,
)
from experiments.papers.intervals import Mean, difference, mean, shown
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, Verdict, agreed, verdict

_BASES = (1.1, 1.3, 1.6, 2.5)
_CE = Arm("ce")
_FLAT = (_CE, Arm("simloss"), Arm("hierarchical_softmax"))
_TREES = {tree: NAMES[tree] for tree in ("vtree", "vtree_chains")}
_RATES = (0.01, 0.03, 0.1, 0.3)


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    regime = Regime(n=8, d=5, k=8, tests=100) if budget.is_toy else Regime(n=1000, d=10, k=100)
    bases = _BASES[:2] if budget.is_toy else _BASES
    arms = [*_FLAT, *(Arm(tree, base) for tree in _TREES for base in bases)]
    trained = Trained(regime, arms, SHARED if budget.is_toy else _RATES)
    yield from search(budget, [trained], draws=2)
    # Two draws per round, for machines with two or more cores.
    yield from measure(budget, [trained], together=2)
    return _section(trained, plots)


def _of(trained: Trained, tree: str) -> list[Arm]:
    """Return the arms of one kind of tree, by base."""
    return [arm for arm in trained.arms if arm.loss == tree]


def _section(trained: Trained, plots: PlotFolder) -> Section:
    printed = published("000", "figure 4")["base"]
    regime = trained.regime
    plot = plots.save(
        EXPERIMENT.name,
        _figure(trained, printed),
        title="Test accuracy of averaged weights by base, each loss at its own best rate. Dashed: "
        "the best base according to the paper.",
        alt_text="V-tree accuracy by base with error bars, and horizontal lines for three losses.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"n = {regime.n}, d = {regime.d}, k = {regime.k}, sigma = {regime.sigma:g}. "
        f"{setup([trained])}",
        claims=[
            *(_against(trained, tree) for tree in _TREES),
            *(_best_base(trained, tree, printed) for tree in _TREES),
        ],
        tables=[_accuracies(trained), _advantages(trained)],
        plots=[plot],
        remarks=[
            "With a large base, a single pseudoclass is the parent of all classes, and the tree "
            "loss is equivalent to cross entropy. A small base produces long paths, so a step at "
            "the same rate moves the row of a class further. Hierarchical softmax uses the tree "
            f"with base {BASE:g}.",
            f"The authors' public code uses cover trees of base {AUTHORS_BASE:g}. Synthetic I "
            "lists its other differences from the paper.",
        ],
    )


def _against(trained: Trained, tree: str) -> Claim:
    """Claim that the tree loss is better at each base, in every reading."""
    trees = _of(trained, tree)
    found, evidence = [], []
    for words, read in claimed().items():
        gaps = {arm.base: trained.advantage(arm, _CE, read) for arm in trees}
        found.append(_at_all([gap for gap in gaps.values() if gap is not None]))
        numbers = ", ".join(f"{shown(gap)} at base {base:g}" for base, gap in gaps.items())
        evidence.append(f"{words}: {numbers}")
    return Claim(
        f"synthetic III: the tree loss ({_TREES[tree]}) beats cross entropy for all bases",
        agreed(found),
        f"{'; '.join(evidence)} (paired, {len(trained.draws)} draws)"
        f"{edges([trained], _CE, *trees)}",
        Kind.PAPER,
    )


def _at_all(gaps: Sequence[Mean]) -> Verdict:
    if not gaps:
        return "degenerate"
    if all(one.low > 0 for one in gaps):
        return "holds"
    return "does not hold" if any(one.high <= 0 for one in gaps) else "not settled"


def _best_base(trained: Trained, tree: str, printed: float) -> Claim:
    """Claim that the paper's base is the best, and better than the mean of all others."""
    found, evidence = [], []
    for words, read in claimed().items():
        one, numbers = _highest(trained, tree, printed, read)
        found.append(one)
        evidence.append(f"{words}: {numbers}")
    return Claim(
        f"synthetic III: accuracy is highest at a base of about {printed:g} ({_TREES[tree]})",
        agreed(found),
        f"{'; '.join(evidence)} (paired, {len(trained.draws)} draws)"
        f"{edges([trained], *_of(trained, tree))}",
        Kind.PAPER,
    )


def _highest(trained: Trained, tree: str, printed: float, read: Reading) -> tuple[Verdict, str]:
    """Return the verdict of one reading, and the numbers behind it."""
    trees = _of(trained, tree)
    best = max(trees, key=lambda arm: mean(read(trained, arm)).value)
    others = [read(trained, arm) for arm in trees if arm.base != printed]
    rest = [mean(of_draw).value for of_draw in zip(*others, strict=True)]
    over = difference(read(trained, Arm(tree, printed)), rest)
    found = verdict(over)
    return (
        "not settled" if found == "holds" and best.base != printed else found,
        f"highest at {best.base:g}; {printed:g} exceeds the mean of the others by {over.text(4)}",
    )


def _accuracies(trained: Trained) -> Table:
    ways = readings()
    rows = [
        [
            _text(arm),
            f"{mean(trained.pseudoclasses(arm)).value:.1f}" if arm.loss in _TREES else "",
            f"{trained.depth(arm).value:.1f}",
            *(mean(read(trained, arm)).text() for read in ways.values()),
        ]
        for arm in trained.arms
    ]
    rows.append(["Bayes", "", "", trained.bayes().text(), *[""] * (len(ways) - 1)])
    return Table("Test accuracy", ["head", "pseudoclasses", "nodes above a class", *ways], rows)


def _advantages(trained: Trained) -> Table:
    ways = readings()
    rows = [
        [_text(arm), *(shown(trained.advantage(arm, _CE, read)) for read in ways.values())]
        for arm in trained.arms
        if arm != _CE
    ]
    return Table("Difference from cross entropy, paired by draw", ["head", *ways], rows)


def _text(arm: Arm) -> str:
    return f"{_TREES[arm.loss]}, base {arm.base:g}" if arm.loss in _TREES else NAMES[arm.loss]


def _figure(trained: Trained, printed: float) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (tree, name) in enumerate(_TREES.items()):
        trees = _of(trained, tree)
        found = [mean(trained.at_own(arm)) for arm in trees]
        axes.errorbar(
            [arm.base * 1.01**number for arm in trees],
            [one.value for one in found],
            yerr=[one.half for one in found],
            marker="os"[number],
            capsize=3,
            label=name,
        )
    ends = [trees[0].base, trees[-1].base]
    for number, arm in enumerate(_FLAT):
        level = mean(trained.at_own(arm))
        (line,) = axes.plot(
            ends, [level.value] * 2, marker="^vD"[number], linestyle=":", label=NAMES[arm.loss]
        )
        axes.axhspan(level.low, level.high, color=line.get_color(), alpha=0.1)
    axes.axvline(printed, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks([arm.base for arm in trees], [f"{arm.base:g}" for arm in trees])
    axes.minorticks_off()
    axes.set_xlabel("base of the cover tree")
    axes.set_ylabel("test accuracy")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-base",
    paper="000",
    title="Synthetic III: the cover tree's base (Figure 4)",
    minutes=3.5,
    full="as many draws of W as in the paper",
    procedure=_procedure,
)
