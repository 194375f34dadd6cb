"""Paper 000, synthetic experiment I (6.1.2, Figure 2): accuracy by n, d, k and sigma."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.synthetic import LOSSES, Arm, Regime
from benchmarks.papers.experiments.trained import (
    AUTHORS_CODE,
    NAMES,
    RATES,
    SHARED,
    Reading,
    Trained,
    claimed,
    edges,
    measure,
    pooled,
    readings,
    search,
    setup,
)
from benchmarks.papers.intervals import Mean, mean, shown
from benchmarks.papers.section import Claim, Kind, Section, Table, Verdict, agreed, verdict

_SWEEPS: Mapping[str, tuple[float, ...]] = {
    "n": (10, 30, 100, 300),
    "d": (4, 16, 64, 256),
    "k": (3, 10, 30, 100),
    "sigma": (0.25, 1.0, 2.0, 4.0),
}
_FULL: Mapping[str, tuple[float, ...]] = {
    "n": (10, 30, 100, 300, 1000, 3000),
    "d": (4, 8, 16, 32, 64, 128, 256),
    "k": (3, 10, 30, 100, 300),
    "sigma": (0.25, 0.5, 1.0, 2.0, 4.0),
}
_TOY: Mapping[str, tuple[float, ...]] = {"n": (3, 5), "k": (4,)}

_ARMS = tuple(Arm(loss) for loss in (*LOSSES, "vtree_chains"))
_VTREE, _CE, _CHAINS = Arm("vtree"), Arm("ce"), Arm("vtree_chains")
_OTHERS = ("ce", "simloss", "hierarchical_softmax")
_MARKS = ("o", "s", "^", "D", "v", "x")


def _course(budget: Budget, album: Album) -> Course:
    sweeps, baseline, rates = _SWEEPS, Regime(), RATES
    if budget.is_full:
        sweeps = _FULL
    elif budget.is_toy:
        sweeps, baseline, rates = _TOY, Regime(n=3, d=8, k=5, tests=100), SHARED
    elif budget.effort < 0.5:
        sweeps = {name: values[::2] for name, values in sweeps.items()}
    axes = {
        name: [Regime(**{**vars(baseline), name: value}) for value in values]
        for name, values in sweeps.items()
    }
    regimes = {
        regime: Trained(regime, _ARMS, rates) for of_axis in axes.values() for regime in of_axis
    }
    everyone = list(regimes.values())
    yield from search(budget, everyone, draws=2)
    yield from measure(budget, everyone)
    return _section(baseline, regimes, axes, album)


def _section(
    baseline: Regime,
    regimes: Mapping[Regime, Trained],
    axes: Mapping[str, Sequence[Regime]],
    album: Album,
) -> Section:
    everyone = list(regimes.values())
    ranges = "; ".join(
        f"{name} of {', '.join(f'{getattr(regime, name):g}' for regime in of_axis)}"
        for name, of_axis in axes.items()
    )
    picture = album.add(
        EXPERIMENT.name,
        _figure(regimes, axes),
        title="Test accuracy by regime, averaged weights, each loss at its own best rate; dashed: "
        "the Bayes classifier.",
        words="A panel each for n, d, k and sigma, with a line with intervals for each loss.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"{setup(everyone)} One of these at a time is changed: {ranges}; the others are "
        f"n = {baseline.n}, d = {baseline.d}, k = {baseline.k}, sigma = {baseline.sigma:g}.",
        claims=_claims(everyone),
        tables=[_accuracies(everyone), _advantages(everyone)],
        pictures=[picture],
        remarks=_remarks(everyone),
    )


def _claims(everyone: Sequence[Trained]) -> list[Claim]:
    pairs = ((_VTREE, _CE), (_CHAINS, _CE), *((_VTREE, Arm(loss)) for loss in _OTHERS[1:]))
    return [*(_against(ours, theirs, everyone) for ours, theirs in pairs), _everywhere(everyone)]


def _against(ours: Arm, theirs: Arm, everyone: Sequence[Trained]) -> Claim:
    """The mean over regimes is positive by every reading."""
    over = {words: pooled(everyone, ours, theirs, read) for words, read in claimed().items()}
    evidence = ", ".join(f"{words} {shown(gap, 4)}" for words, gap in over.items())
    own = _settled(everyone, ours, theirs, next(iter(claimed().values())))
    return Claim(
        f"synthetic I: the tree loss ({NAMES[ours.loss]}) beats {NAMES[theirs.loss]}",
        agreed([verdict(gap) for gap in over.values()]),
        f"accuracy, mean of {len(own)} regimes: {evidence} (paired, {len(everyone[0].draws)} "
        f"draws); at own rates higher in {_higher(own)}, lower in {_lower(own)} of the regimes"
        f"{edges(everyone, ours, theirs)}",
        Kind.PAPER,
    )


def _settled(everyone: Sequence[Trained], ours: Arm, theirs: Arm, read: Reading) -> list[Mean]:
    """The advantage in each regime that has one."""
    apart = [one.advantage(ours, theirs, read) for one in everyone]
    return [gap for gap in apart if gap is not None]


def _everywhere(everyone: Sequence[Trained]) -> Claim:
    """The V-tree beats every other loss in every regime, except where both are cross entropy."""
    found: list[Verdict] = []
    evidence = []
    for words, read in claimed().items():
        gaps = [gap for other in _OTHERS for gap in _settled(everyone, _VTREE, Arm(other), read)]
        higher, worse = _higher(gaps), sum(gap.high <= 0 for gap in gaps)
        evidence.append(f"{words}: better in {higher}, no better in {worse} of {len(gaps)}")
        if not gaps:
            found.append("degenerate")
        elif worse:
            found.append("does not hold")
        else:
            found.append("holds" if higher == len(gaps) else "not settled")
    return Claim(
        "synthetic I: the tree loss outperforms all others in all regimes",
        agreed(found),
        f"pairs of a loss and a regime: {'; '.join(evidence)}",
        Kind.PAPER,
    )


def _higher(found: Sequence[Mean]) -> int:
    return sum(one.low > 0 for one in found)


def _lower(found: Sequence[Mean]) -> int:
    return sum(one.high < 0 for one in found)


def _accuracies(everyone: Sequence[Trained]) -> Table:
    header = ["n, d, k, sigma", *(NAMES[arm.loss] for arm in _ARMS), "Bayes"]
    rows = [
        [
            _said(one.regime),
            *(mean(one.at_own(arm)).text() for arm in _ARMS),
            one.bayes().text(),
        ]
        for one in everyone
    ]
    return Table("Test accuracy, averaged weights, each at its own best rate", header, rows)


def _advantages(everyone: Sequence[Trained]) -> Table:
    ways = readings()
    rows = [
        [_said(one.regime), *(shown(one.advantage(_VTREE, _CE, read)) for read in ways.values())]
        for one in everyone
    ]
    for arm in (_VTREE, _CHAINS):
        over = [pooled(everyone, arm, _CE, read) for read in ways.values()]
        rows.append([f"all, {NAMES[arm.loss]}", *(shown(found, 4) for found in over)])
    return Table("V-tree minus cross entropy, paired by draw", ["n, d, k, sigma", *ways], rows)


def _said(regime: Regime) -> str:
    return f"{regime.n:g}, {regime.d:g}, {regime.k:g}, {regime.sigma:g}"


def _remarks(everyone: Sequence[Trained]) -> list[str]:
    flat = [one.is_cross_entropy(_VTREE) for one in everyone]
    depths = [mean([one.depth(arm).value for one in everyone]).value for arm in (_VTREE, _CHAINS)]
    return [
        AUTHORS_CODE,
        "The paper replaces every inner node by a pseudoclass. Where a pseudoclass has one child, "
        "kway's V-tree merges both into one vector; V-tree with chains keeps them.",
        f"In {sum(map(sum, flat))} of {sum(map(len, flat))} draws the V-tree is flat, one "
        "pseudoclass above all classes: random vectors of many dimensions are all equally far from "
        "each other. There the V-tree and hierarchical softmax are cross entropy at any rate; "
        "these comparisons are degenerate and left out of the means.",
        "Every node of a class's path moves in a step, so a longer path can move its row further "
        f"at the same rate: on average {depths[0]:.1f} nodes lie above a class, {depths[1]:.1f} "
        "where pseudoclasses with one child are kept (V-tree with chains). A shared rate is so not "
        "the same rate for all, and the Lipschitz constant of Lemma 1, which the paper takes to be "
        "the same for all parameterizations, can grow with the depth.",
    ]


def _figure(regimes: Mapping[Regime, Trained], axes: Mapping[str, Sequence[Regime]]) -> Figure:
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for panel, (name, of_axis) in zip(panels, axes.items(), strict=False):
        for number, arm in enumerate(_ARMS):
            found = [mean(regimes[regime].at_own(arm)) for regime in of_axis]
            # A little apart, so that intervals do not hide each other.
            places = [float(getattr(regime, name)) * 1.03 ** (number - 2) for regime in of_axis]
            panel.errorbar(
                places,
                [one.value for one in found],
                yerr=[one.half for one in found],
                marker=_MARKS[number],
                markersize=4,
                linewidth=1,
                capsize=2,
                label=NAMES[arm.loss],
            )
        values = [float(getattr(regime, name)) for regime in of_axis]
        best = [regimes[regime].bayes().value for regime in of_axis]
        panel.plot(values, best, "k--", linewidth=1, label="Bayes")
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.minorticks_off()
        panel.set_xlabel(name)
        panel.set_ylabel("test accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-regimes",
    paper="000",
    title="Synthetic I: data regimes (Figure 2)",
    minutes=3.5,
    full="as many draws of W as the paper, at more values of n, d, k and sigma",
    course=_course,
)
