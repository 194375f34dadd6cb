"""Paper 000, synthetic experiment III (6.1.4, Figure 4): accuracy by the cover tree's base."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.synthetic import (
    SHARED,
    Arm,
    Reading,
    Regime,
    Trained,
    own,
    readings,
    setup,
    shared,
)
from benchmarks.papers.intervals import difference, mean
from benchmarks.papers.published import published
from benchmarks.papers.section import Claim, Section, Table, Verdict, verdict

_BASES = (1.05, 1.3, 1.6, 2.0, 3.0, 5.0)
_CE = Arm("ce")
_RATES = (0.01, 0.1, 1.0)


def _course(budget: Budget, album: Album) -> Course:
    regime = Regime(n=8, d=5, k=8, tests=100) if budget.is_toy else Regime(n=1000, d=10, k=100)
    arms = [_CE, *(Arm("vtree", base) for base in (_BASES[:2] if budget.is_toy else _BASES))]
    trained = Trained(regime, arms, _RATES)
    # Two draws at a time: there are two cores at least.
    for number in budget.rounds(at_least=25 if budget.is_full else 2, at_most=25):
        jobs = [trained.job(draw) for draw in (2 * number, 2 * number + 1)]
        results = yield jobs
        for job in jobs:
            trained.add(results[job])
    return _section(trained, album)


def _section(trained: Trained, album: Album) -> Section:
    trees = [arm for arm in trained.arms if arm != _CE]
    means = [mean(trained.at_own(arm)).value for arm in trees]
    best = trees[means.index(max(means))]
    printed = published("000", "figure 4")["base"]
    regime = trained.regime
    picture = album.add(
        EXPERIMENT.name,
        _figure(trained, printed),
        title="Test accuracy by base, averaged weights; dashed: the base that the paper names.",
        words="Accuracy with intervals of the V-tree by base, and a level line of cross entropy.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"n = {regime.n}, d = {regime.d}, k = {regime.k}, sigma = {regime.sigma:g}. "
        f"{setup([trained])}",
        claims=[
            *(
                _against(trained, trees, words, read)
                for words, read in (
                    ("each at its own best rate", own()),
                    *((f"all at rate {rate:g}", shared(rate)) for rate in SHARED),
                )
            ),
            _best_base(trained, trees, best, printed),
        ],
        tables=[_accuracies(trained), _advantages(trained, trees)],
        pictures=[picture],
        remarks=[
            f"Here the best base is {best.base:g}. A large base leaves one pseudoclass above all "
            "classes, which is the cross entropy itself; a small one has long paths, whose classes "
            "move further at the same rate.",
        ],
    )


def _against(trained: Trained, trees: Sequence[Arm], words: str, read: Reading) -> Claim:
    apart = [trained.advantage(arm, _CE, read) for arm in trees]
    found: Verdict = "not settled"
    if all(one.low > 0 for one in apart):
        found = "holds"
    elif any(one.high <= 0 for one in apart):
        found = "does not hold"
    numbers = ", ".join(
        f"{one.text()} at {arm.base:g}" for arm, one in zip(trees, apart, strict=True)
    )
    return Claim(
        f"synthetic III: the tree loss beats cross entropy for all bases, {words}",
        found,
        f"by base: {numbers} (paired, {apart[0].n} draws)",
    )


def _best_base(trained: Trained, trees: Sequence[Arm], best: Arm, printed: float) -> Claim:
    """The paper's base against the mean of all others."""
    paper = Arm("vtree", printed)
    others = [trained.at_own(arm) for arm in trees if arm != paper]
    rest = [mean(of_draw).value for of_draw in zip(*others, strict=True)]
    over = difference(trained.at_own(paper), rest)
    return Claim(
        f"synthetic III: accuracy is highest at a base of about {printed:g}",
        verdict(over) if best == paper else "does not hold" if over.high < 0 else "not settled",
        f"highest at {best.base:g}; at {printed:g} {over.text(4)} above the mean of the others "
        f"(own best rates, paired, {over.n} draws)",
    )


def _accuracies(trained: Trained) -> Table:
    ways = readings()
    rows = [
        [
            _said(arm),
            "" if arm == _CE else f"{mean(trained.pseudoclasses(arm)).value:.1f}",
            f"{trained.depth(arm).value:.1f}",
            *(mean(read(trained, arm)).text() for read in ways.values()),
        ]
        for arm in trained.arms
    ]
    rows.append(["Bayes", "", "", trained.bayes().text(), *[""] * (len(ways) - 1)])
    return Table("Test accuracy", ["head", "pseudoclasses", "nodes above a class", *ways], rows)


def _advantages(trained: Trained, trees: Sequence[Arm]) -> Table:
    ways = readings()
    rows = [
        [_said(arm), *(trained.advantage(arm, _CE, read).text() for read in ways.values())]
        for arm in trees
    ]
    return Table("V-tree minus cross entropy, paired by draw", ["head", *ways], rows)


def _said(arm: Arm) -> str:
    return "cross entropy" if arm == _CE else f"V-tree, base {arm.base:g}"


def _figure(trained: Trained, printed: float) -> Figure:
    trees = [arm for arm in trained.arms if arm != _CE]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    ways = [("own best rates", own()), *((f"all at {rate:g}", shared(rate)) for rate in SHARED)]
    for number, (words, read) in enumerate(ways):
        found = [mean(read(trained, arm)) for arm in trees]
        level = mean(read(trained, _CE)).value
        (line, *_) = axes.errorbar(
            [arm.base * 1.01 ** (number - 1) for arm in trees],
            [one.value for one in found],
            yerr=[one.half for one in found],
            marker="os^"[number],
            capsize=3,
            label=f"V-tree, {words}",
        )
        ends = axes.plot(
            [trees[0].base, trees[-1].base],
            [level, level],
            color=line.get_color(),
            marker="os^"[number],
            fillstyle="none",
            linestyle=":",
            label=f"cross entropy, {words}",
        )
        assert ends
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
    minutes=2.5,
    full="as many draws of W as the paper",
    course=_course,
)
