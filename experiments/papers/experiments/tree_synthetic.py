"""Paper 000, synthetic experiments I, III and IV (6.1, Figures 2, 4 and 5).

The text names neither optimizer, learning rate nor base. Each figure is made twice: with the
authors' published code, whose rate is 1e-4, and with the setting of the paper's theory. Both are
evaluated at the rate of the authors and with the best rate of each loss.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from experiments.papers import tree_simulation as simulation
from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, best_rate, mean_accuracies, search
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean
from experiments.papers.job import Folders, Job, Measures, Results
from experiments.papers.section import Claim, Section, Table, Verdict, verdict
from experiments.papers.tree_simulation import AUTHORS_RATE, Protocol, Regime
from heads.tree import build_cover_tree

BASE = 2.0
_PROTOCOLS = {
    "authors": simulation.AUTHORS,
    "text": simulation.TEXT,
    "authors, bases": simulation.AUTHORS_BASES,
}
# The tree loss of each protocol: see `path_counts`.
_TREE = {"authors": "authors", "text": "chains", "authors, bases": "authors"}
_OTHERS = ("ce", "simloss", "hierarchical_softmax")
_NAMES = {
    "tree": "tree loss",
    "vtree": "V-tree without chains",
    "ce": "cross entropy",
    "simloss": "SimLoss",
    "hierarchical_softmax": "hierarchical softmax",
}
# The search starts with these rates and adds rates until the best one has a worse one on each side.
_RATES = tuple(float(f"{10 ** (exponent / 2):.2g}") for exponent in range(-8, 1))
_LIMITS = 1e-6, 1e3
_SEARCH_DRAWS, _DRAWS, _TESTS = 20, 100, 1000

_AXES: Mapping[str, tuple[float, ...]] = {
    "n": (16, 64, 256, 1024),
    "d": (8, 64, 256),
    "k": (10, 30, 100),
    "sigma": (1, 2, 4),
}
_LABELS = {
    "n": "n, training samples",
    "d": "d, dimensions",
    "k": "k, classes",
    "sigma": "sigma, noise",
    "base": "base of the cover tree",
    "epsilon": "epsilon",
}
_BASES = (1.1, 1.2, 1.3, 1.4, 1.6, 2.0, 2.5, 3.0, 5.0)
_EPSILONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_RANKS: Mapping[str, int | None] = {"authors": 5, "text": None}


@dataclass(frozen=True)
class Arm:
    """A loss trained in a regime by a protocol. `base` is that of the cover tree."""

    regime: Regime
    protocol: str
    loss: str
    base: float = BASE

    def job(self, seeds: Sequence[int], rates: Sequence[float], tests: int) -> Job:
        return Job(
            "experiments.tree_synthetic:train_arm",
            {
                "regime": asdict(self.regime),
                "protocol": self.protocol,
                "loss": self.loss,
                "base": self.base,
                "seeds": list(seeds),
                "rates": list(rates),
                "tests": tests,
            },
        )


# The measures of a run: its accuracy at the authors' rate and at the best rate of its loss.
_RATES_OF = {"authors": "rate 1e-4", "own": "own best rates"}


def train_arm(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Train one loss at several rates on several draws (a job). Returns accuracies by rate."""
    protocol: Protocol = _PROTOCOLS[settings["protocol"]]
    loss, rates = settings["loss"], settings["rates"]
    draws = simulation.draw(
        Regime(**settings["regime"]), settings["seeds"], tests=settings["tests"]
    )
    kind = {"tree": _TREE[settings["protocol"]], "vtree": "vtree"}.get(loss, "ce")
    if loss == "hierarchical_softmax":
        trees = [
            build_cover_tree(one, base=settings["base"], metric="euclidean").vtree()
            for one in draws.vectors
        ]
        found = simulation.train_hierarchical(draws, trees, rates, protocol)
        counts = []
    else:
        counts = [simulation.path_counts(kind, one, settings["base"]) for one in draws.vectors]
        similarity = simulation.similarities(draws) if loss == "simloss" else None
        found = simulation.train(draws, counts, rates, protocol, similarity=similarity)
    by_rate = found.accuracy.T.tolist()
    return {"accuracy": [[round(one, 4) for one in of_rate] for of_rate in by_rate]}


def arms_of(protocol: str, *, toy: bool = False) -> dict[str, list[tuple[float, list[Arm]]]]:
    """Return the arms of Figures 2, 4 and 5 by axis and value. The first arm is the tree loss."""
    base = Regime(n=6, d=4, k=5) if toy else Regime()
    axes = {"n": (6,), "k": (5,)} if toy else _AXES
    rank = _RANKS[protocol]
    found: dict[str, list[tuple[float, list[Arm]]]] = {}
    for axis, values in axes.items():
        found[axis] = []
        for value in values:
            changed = {axis: value if axis == "sigma" else int(value)}
            regime = Regime(**{**asdict(base), "rank": rank, **changed})
            losses = ("tree", "vtree", *_OTHERS)
            found[axis].append((value, [Arm(regime, protocol, loss) for loss in losses]))
    metric = replace(base, rank=rank)
    found["epsilon"] = [
        (
            value,
            [Arm(replace(metric, epsilon=value), protocol, "tree"), Arm(metric, protocol, "ce")],
        )
        for value in (_EPSILONS[::4] if toy else _EPSILONS)
    ]
    shape = replace(base, rank=rank) if toy else Regime(n=1000, d=10, k=100, rank=rank)
    steps = "authors, bases" if protocol == "authors" else protocol
    found["base"] = [
        (value, [Arm(shape, steps, "tree", value), Arm(shape, steps, "ce")])
        for value in (_BASES[2:6:3] if toy else _BASES)
    ]
    return found


def _low_rank(*, toy: bool) -> list[tuple[str, Arm, Arm]]:
    """Return pairs (description, tree loss, cross entropy) with W* of low rank, text's protocol."""
    pairs = []
    for rank in (2, 5):
        for k in (5,) if toy else (10, 30):
            regime = Regime(n=6, d=4, k=k, rank=rank) if toy else Regime(k=k, rank=rank)
            arms = (Arm(regime, "text", "tree"), Arm(regime, "text", "ce"))
            pairs.append((f"rank {rank}, k = {k}", *arms))
    return pairs


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    toy = budget.is_toy
    figures = {protocol: arms_of(protocol, toy=toy) for protocol in _RANKS}
    low_rank = _low_rank(toy=toy)
    arms = list(
        dict.fromkeys(
            [
                *(
                    arm
                    for figure in figures.values()
                    for of_axis in figure.values()
                    for _, of_value in of_axis
                    for arm in of_value
                ),
                *(arm for _, *pair in low_rank for arm in pair),
            ]
        )
    )
    trained, draws = yield from measured(budget, arms)
    return _section(trained, figures, low_rank, draws, plots)


def measured(
    budget: Budget, arms: Sequence[Arm]
) -> Generator[Sequence[Job], Results, tuple[Compared[Arm], int]]:
    """Search the rate of each arm, measure it at that rate and at the authors', on other draws.

    Returns the results and the number of draws.
    """
    toy = budget.is_toy
    tests = 50 if toy else _TESTS
    seeds = range(2 if toy else max(5, round(_SEARCH_DRAWS * budget.effort)))
    searched = yield from search(
        arms,
        lambda arm, rates: [arm.job(seeds, rates, tests)],
        mean_accuracies,
        rates=_RATES[::4] if toy else _RATES,
        limits=(_RATES[0], _RATES[-1]) if toy else _LIMITS,
    )
    draws = 3 if toy else budget.size(_DRAWS, least=25)
    compared = range(1000 + budget.first_seed, 1000 + budget.first_seed + draws)
    jobs = {arm: arm.job(compared, [best_rate(searched[arm]), AUTHORS_RATE], tests) for arm in arms}
    results = yield list(jobs.values())
    runs: dict[Arm, list[Measures]] = {
        arm: [
            {"own": own, "authors": authors}
            for own, authors in zip(*results[job]["accuracy"], strict=True)
        ]
        for arm, job in jobs.items()
    }
    return Compared(searched, runs), draws


Figures = Mapping[str, Mapping[str, Sequence[tuple[float, Sequence[Arm]]]]]


def _section(
    trained: Compared[Arm],
    figures: Figures,
    low_rank: Sequence[tuple[str, Arm, Arm]],
    draws: int,
    plots: PlotFolder,
) -> Section:
    edges = sum(trained.is_at_edge(arm) for arm in trained.searched)
    baseline = [figures[protocol]["k"][0][1][:3] for protocol in _RANKS]
    return Section(
        setup=f"{draws} draws per point, {_TESTS:,} test samples per draw, one pass of SGD. "
        "*authors* (github.com/cora1021/TreeLoss): rate 1e-4, momentum 0.9, weight decay "
        "3e-4, random start, last weights, W* of rank 5, cover trees of base 2 whose pseudoclasses "
        "with the same center share a vector. *text*: W* with independent entries (Eq. 17), "
        "plain SGD from zero, averaged weights, a pseudoclass for each class and level, base 2. "
        f"The best rate of each loss is searched on {_SEARCH_DRAWS} other draws with factors of "
        f"3.2 until a lower and a higher rate are worse; {edges} of {len(trained.searched)} "
        "searches ended at a limit. Defaults: n = 100, d = 64, k = 10, sigma = 1; for Figure 4 "
        "n = 1,000, d = 10, k = 100.",
        claims=_claims(trained, figures, low_rank),
        tables=[
            *(_table(trained, figures[protocol], protocol) for protocol in _RANKS),
            _rank_table(trained, low_rank),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(trained, figures),
                title="Test accuracy by regime, base and metric quality. Dotted: all losses at the "
                "authors' rate of 1e-4. Solid: each loss at its own best rate.",
                alt_text="Six panels per protocol: n, d, k, sigma, base and epsilon.",
            ),
            plots.save(
                f"{EXPERIMENT.name}-rates",
                _rate_figure(trained, baseline),
                title="Accuracy by learning rate (n = 100, d = 64, k = 10). A step with a tree "
                "moves the row of a class further, so its curve is shifted to lower rates.",
                alt_text="Two panels of accuracy over rate for the tree loss and cross entropy.",
            ),
        ],
        remarks=[
            "Why the tree loss wins at 1e-4: one pass of at most 1,000 steps at this rate stops "
            "long before any loss has converged. A step on a sample changes the row of a class by "
            "M = P P^T instead of the identity, so every node on a shared path adds to the "
            "movement: a tree with L shared levels trains like cross entropy at a rate a few times "
            "higher. The second plot shows two curves of the same shape, shifted along the rate. "
            "With the best rate of each loss, the difference disappears or changes its sign.",
        ],
    )


def _gains(
    trained: Compared[Arm], points: Sequence[tuple[float, Sequence[Arm]]], other: int, measure: str
) -> list[tuple[float, Mean]]:
    """Return the tree's gain over the arm with index `other` for each point of an axis."""
    return [(value, trained.gain(arms[0], arms[other], measure)) for value, arms in points]


def _summary(gains: Sequence[tuple[float, Mean]]) -> str:
    lowest, highest = (
        choose((gain for _, gain in gains), key=lambda gain: gain.value) for choose in (min, max)
    )
    better, worse = (
        sum(gain.low > 0 for _, gain in gains),
        sum(gain.high < 0 for _, gain in gains),
    )
    return (
        f"{lowest.text()} to {highest.text()}; better in {better} and worse in {worse} of "
        f"{len(gains)}"
    )


def _everywhere(gains: Sequence[tuple[float, Mean]]) -> Verdict:
    """Return the verdict on the claim that every gain is positive."""
    verdicts = {verdict(gain) for _, gain in gains}
    if verdicts == {"holds"}:
        return "holds"
    return "does not hold" if any(gain.high < 0 for _, gain in gains) else "not settled"


def _claims(
    trained: Compared[Arm], figures: Figures, low_rank: Sequence[tuple[str, Arm, Arm]]
) -> list[Claim]:
    claims = []
    for protocol in _RANKS:
        axes = figures[protocol]
        regimes = [
            point for axis in axes if axis not in ("base", "epsilon") for point in axes[axis]
        ]
        for measure, rate in _RATES_OF.items():
            where = f"{protocol}, {rate}"
            for index, other in enumerate(_OTHERS, start=2):
                gains = _gains(trained, regimes, index, measure)
                claims.append(
                    Claim(
                        f"Figure 2: the tree loss beats {_NAMES[other]} in all regimes ({where})",
                        _everywhere(gains),
                        _summary(gains),
                    )
                )
            gains = _gains(trained, axes["base"], 1, measure)
            claims.append(
                Claim(
                    f"Figure 4: the tree loss beats cross entropy at every base ({where})",
                    _everywhere(gains),
                    _summary(gains),
                )
            )
            claims.append(_best_base(trained, axes["base"], where, measure))
            value, gain = _gains(trained, axes["epsilon"], 1, measure)[-1]
            claims.append(
                Claim(
                    f"Figure 5: at epsilon = {value:g} the tree loss beats cross entropy ({where})",
                    verdict(gain),
                    gain.text(4),
                )
            )
    return claims


def _best_base(
    trained: Compared[Arm], points: Sequence[tuple[float, Sequence[Arm]]], where: str, measure: str
) -> Claim:
    by_value = {value: arms[0] for value, arms in points}
    levels = {value: trained.mean(arm, measure) for value, arm in by_value.items()}
    best = max(levels, key=lambda value: levels[value].value)
    near = _is_about_1_3(best)
    rivals = [arm for value, arm in by_value.items() if _is_about_1_3(value) is not near]
    settled = all(trained.gain(by_value[best], rival, measure).low > 0 for rival in rivals)
    found: Verdict = "holds" if near else "does not hold"
    return Claim(
        f"Figure 4: accuracy is highest at a base of about 1.3 ({where})",
        found if settled else "not settled",
        f"highest at {best:g} (accuracy {levels[best].text()})",
    )


def _is_about_1_3(base: float) -> bool:
    return 1.2 <= base <= 1.4


def _table(
    trained: Compared[Arm], axes: Mapping[str, Sequence[tuple[float, Sequence[Arm]]]], protocol: str
) -> Table:
    rows = []
    for axis, points in axes.items():
        for value, arms in points:
            tree, plain = arms[0], next(arm for arm in arms if arm.loss == "ce")
            others = {arm.loss: arm for arm in arms[1:] if arm is not plain}
            rows.append(
                [
                    f"{axis} = {value:g}",
                    trained.mean(plain, "authors").text(),
                    trained.gain(tree, plain, "authors").text(),
                    trained.mean(plain, "own").text(),
                    trained.gain(tree, plain, "own").text(),
                    *(
                        trained.gain(others[loss], plain, "own").text() if loss in others else ""
                        for loss in ("vtree", *_OTHERS[1:])
                    ),
                ]
            )
    header = [
        "point",
        "cross entropy at 1e-4",
        "tree loss - cross entropy at 1e-4",
        "cross entropy at its best rate",
        *(
            f"{_NAMES[loss]} - cross entropy, own best rates"
            for loss in ("tree", "vtree", *_OTHERS[1:])
        ),
    ]
    return Table(f"Test accuracy, {protocol} protocol", header, rows)


def _rank_table(trained: Compared[Arm], low_rank: Sequence[tuple[str, Arm, Arm]]) -> Table:
    rows = [
        [
            text,
            trained.mean(plain, "own").text(),
            trained.gain(tree, plain, "own").text(),
            f"{trained.rate(tree):g}, {trained.rate(plain):g}",
        ]
        for text, tree, plain in low_rank
    ]
    return Table(
        "W* of low rank, text protocol, own best rates",
        ["W*", "cross entropy", "tree loss - cross entropy", "rates"],
        rows,
    )


def _figure(trained: Compared[Arm], figures: Figures) -> Figure:
    axes = list(next(iter(figures.values())))
    figure = Figure(figsize=(3 * len(axes), 6), layout="constrained")
    panels = figure.subplots(len(figures), len(axes), squeeze=False)
    for row, (protocol, of_axes) in zip(panels, figures.items(), strict=True):
        for panel, (axis, points) in zip(row, of_axes.items(), strict=True):
            for index, arm in enumerate(points[0][1]):
                for measure, style in (("own", "-"), ("authors", ":")):
                    levels = [trained.mean(arms[index], measure) for _, arms in points]
                    panel.errorbar(
                        [value for value, _ in points],
                        [level.value for level in levels],
                        yerr=[level.half for level in levels],
                        linestyle=style,
                        marker="o" if style == "-" else None,
                        markersize=3,
                        color=f"C{[*_NAMES].index(arm.loss)}",
                        label=_NAMES[arm.loss] if style == "-" else None,
                    )
            if axis not in ("epsilon", "base"):
                panel.set_xscale("log")
            panel.set_xlabel(_LABELS[axis])
        row[0].set_ylabel(f"accuracy, {protocol} protocol")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _rate_figure(trained: Compared[Arm], baseline: Sequence[Sequence[Arm]]) -> Figure:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, arms in zip(panels, baseline, strict=True):
        for arm in (arms[0], arms[2]):
            searched = dict(sorted(trained.searched[arm].items()))
            panel.plot(
                list(searched), list(searched.values()), "o-", markersize=3, label=_NAMES[arm.loss]
            )
        panel.axvline(AUTHORS_RATE, color="black", linestyle=":", linewidth=1)
        panel.set_xscale("log")
        panel.set_title(f"{arms[0].protocol} protocol", fontsize=10)
        panel.set_xlabel("learning rate")
    panels[0].set_ylabel("test accuracy")
    panels[0].legend()
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic",
    paper="000",
    title="Synthetic data: regimes, bases and metrics (Figures 2, 4 and 5)",
    minutes=12,
    procedure=_procedure,
)
