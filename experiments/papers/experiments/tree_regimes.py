"""Paper 000, synthetic experiment I (6.1.2, Figure 2): accuracy by n, d, k and sigma."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.synthetic import LOSSES, Arm, Regime
from experiments.papers.experiments.trained import (
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
from experiments.papers.intervals import Mean, mean, shown
from experiments.papers.section import Claim, Kind, Section, Table, Verdict, agreed, verdict

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
_AXIS_LABELS = {
    "n": "n, training samples",
    "d": "d, dimensions",
    "k": "k, classes",
    "sigma": "sigma, standard deviation of the noise",
}


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
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
    all_trained = list(regimes.values())
    yield from search(budget, all_trained, draws=2)
    yield from measure(budget, all_trained)
    return _section(baseline, regimes, axes, plots)


def _section(
    baseline: Regime,
    regimes: Mapping[Regime, Trained],
    axes: Mapping[str, Sequence[Regime]],
    plots: PlotFolder,
) -> Section:
    all_trained = list(regimes.values())
    ranges = "; ".join(
        f"{name} = {', '.join(f'{getattr(regime, name):g}' for regime in of_axis)}"
        for name, of_axis in axes.items()
    )
    plot = plots.save(
        EXPERIMENT.name,
        _figure(regimes, axes),
        title="Test accuracy of averaged weights by regime, each loss at its own best rate. "
        "Dashed: the Bayes classifier.",
        alt_text="Four panels for n, d, k and sigma, each with one line per loss and error bars.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"{setup(all_trained)} One parameter is varied at a time: {ranges}. The defaults are "
        f"n = {baseline.n}, d = {baseline.d}, k = {baseline.k}, sigma = {baseline.sigma:g}.",
        claims=_claims(all_trained),
        tables=[_accuracies(all_trained), _advantages(all_trained)],
        plots=[plot],
        remarks=_remarks(all_trained),
    )


def _claims(all_trained: Sequence[Trained]) -> list[Claim]:
    pairs = ((_VTREE, _CE), (_CHAINS, _CE), *((_VTREE, Arm(loss)) for loss in _OTHERS[1:]))
    return [
        *(_against(ours, theirs, all_trained) for ours, theirs in pairs),
        _everywhere(all_trained),
    ]


def _against(ours: Arm, theirs: Arm, all_trained: Sequence[Trained]) -> Claim:
    """Claim that the mean advantage over regimes is positive in every reading."""
    over = {words: pooled(all_trained, ours, theirs, read) for words, read in claimed().items()}
    evidence = ", ".join(f"{words} {shown(gap, 4)}" for words, gap in over.items())
    own = _settled(all_trained, ours, theirs, next(iter(claimed().values())))
    return Claim(
        f"synthetic I: the tree loss ({NAMES[ours.loss]}) beats {NAMES[theirs.loss]}",
        agreed([verdict(gap) for gap in over.values()]),
        f"mean accuracy difference over {len(own)} regimes: {evidence} (paired, "
        f"{len(all_trained[0].draws)} draws); at own rates higher in {_higher(own)} and lower in "
        f"{_lower(own)} of these regimes"
        f"{edges(all_trained, ours, theirs)}",
        Kind.PAPER,
    )


def _settled(all_trained: Sequence[Trained], ours: Arm, theirs: Arm, read: Reading) -> list[Mean]:
    """Return the advantage in each regime that is not degenerate."""
    gaps = [one.advantage(ours, theirs, read) for one in all_trained]
    return [gap for gap in gaps if gap is not None]


def _everywhere(all_trained: Sequence[Trained]) -> Claim:
    """Claim that the V-tree beats every other loss in every regime that is not degenerate."""
    found: list[Verdict] = []
    evidence = []
    for words, read in claimed().items():
        gaps = [gap for other in _OTHERS for gap in _settled(all_trained, _VTREE, Arm(other), read)]
        higher, worse = _higher(gaps), sum(gap.high <= 0 for gap in gaps)
        evidence.append(f"{words}: better in {higher}, not better in {worse} of {len(gaps)}")
        if not gaps:
            found.append("degenerate")
        elif worse:
            found.append("does not hold")
        else:
            found.append("holds" if higher == len(gaps) else "not settled")
    return Claim(
        "synthetic I: the tree loss outperforms all other losses in all regimes",
        agreed(found),
        f"combinations of loss and regime: {'; '.join(evidence)}",
        Kind.PAPER,
    )


def _higher(found: Sequence[Mean]) -> int:
    return sum(one.low > 0 for one in found)


def _lower(found: Sequence[Mean]) -> int:
    return sum(one.high < 0 for one in found)


def _accuracies(all_trained: Sequence[Trained]) -> Table:
    header = ["n, d, k, sigma", *(NAMES[arm.loss] for arm in _ARMS), "Bayes"]
    rows = [
        [
            _text(one.regime),
            *(mean(one.at_own(arm)).text() for arm in _ARMS),
            one.bayes().text(),
        ]
        for one in all_trained
    ]
    return Table("Test accuracy of averaged weights, each loss at its own best rate", header, rows)


def _advantages(all_trained: Sequence[Trained]) -> Table:
    ways = readings()
    rows = [
        [_text(one.regime), *(shown(one.advantage(_VTREE, _CE, read)) for read in ways.values())]
        for one in all_trained
    ]
    for arm in (_VTREE, _CHAINS):
        over = [pooled(all_trained, arm, _CE, read) for read in ways.values()]
        rows.append([f"all, {NAMES[arm.loss]}", *(shown(found, 4) for found in over)])
    return Table("V-tree minus cross entropy, paired by draw", ["n, d, k, sigma", *ways], rows)


def _text(regime: Regime) -> str:
    return f"{regime.n:g}, {regime.d:g}, {regime.k:g}, {regime.sigma:g}"


def _remarks(all_trained: Sequence[Trained]) -> list[str]:
    flat = [one.is_cross_entropy(_VTREE) for one in all_trained]
    depths = [
        mean([one.depth(arm).value for one in all_trained]).value for arm in (_VTREE, _CHAINS)
    ]
    return [
        AUTHORS_CODE,
        "The paper replaces every inner node with a pseudoclass. kway's V-tree merges a "
        "pseudoclass that has only one child with that child; the V-tree with chains keeps both.",
        f"In {sum(map(sum, flat))} of {sum(map(len, flat))} draws, the V-tree is flat: a single "
        "pseudoclass is the parent of all classes, because random vectors in high dimensions "
        "have nearly equal pairwise distances. In these draws, the V-tree and hierarchical "
        "softmax are equivalent to cross entropy at any rate, so the comparisons are degenerate "
        "and excluded from the means.",
        "A step updates every node on the path to a class, so at the same rate, the row of a class "
        f"with a longer path can move further. On average, a class has {depths[0]:.1f} ancestors, "
        f"or {depths[1]:.1f} if pseudoclasses with one child are kept (V-tree with chains). Losses "
        "with the same nominal rate therefore have different effective rates, and the Lipschitz "
        "constant of Lemma 1, which the paper assumes to be the same for all parameterizations, "
        "can grow with the depth.",
    ]


def _figure(regimes: Mapping[Regime, Trained], axes: Mapping[str, Sequence[Regime]]) -> Figure:
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    for panel, (name, of_axis) in zip(panels, axes.items(), strict=False):
        for number, arm in enumerate(_ARMS):
            found = [mean(regimes[regime].at_own(arm)) for regime in of_axis]
            # Shifted slightly so that the intervals do not overlap.
            positions = [float(getattr(regime, name)) * 1.03 ** (number - 2) for regime in of_axis]
            panel.errorbar(
                positions,
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
        panel.set_xlabel(_AXIS_LABELS[name])
        panel.set_ylabel("test accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-regimes",
    paper="000",
    title="Synthetic I: data regimes (Figure 2)",
    minutes=3.5,
    full="as many draws of W as in the paper, with more values of n, d, k and sigma",
    procedure=_procedure,
)
