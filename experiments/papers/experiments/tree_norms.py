"""Paper 000, synthetic experiment II (6.1.3, Figure 3): norms of the parameters by k.

Norms are computed at W* and for trained weights. At W*, the U-tree's parameters follow from Eq. 2.
The V-tree's are not unique; of those that represent W*, the ones with the least norm are used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.edges import edge_note, is_at_edge
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.synthetic import BASE, Arm, Regime, draw
from experiments.papers.experiments.trained import (
    PUBLISHED_DRAWS,
    SHARED,
    Trained,
    measure,
    search,
    setup,
)
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Kind, Section, Table, agreed, verdict
from heads.tree import LabelTree, build_cover_tree

_EXACT = ("W*", "U*", "V*", "V* of another metric")
_TRAINED = {"W": Arm("ce"), "V": Arm("vtree")}
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
_MARKS = ("o", "s", "^", "D")


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    classes = (4, 8, 16) if budget.is_toy else (10, 32, 100, 316, 1000)
    trained_classes = classes if budget.is_full else classes[: 2 if budget.is_toy else 4]
    n, tests = (10, 100) if budget.is_toy else (1000, 10_000)
    numbers = range(2 if budget.is_toy else PUBLISHED_DRAWS if budget.is_full else 10)
    line = Job("experiments.tree_norms:norms_on_a_line", {"classes": [2**i for i in range(1, 12)]})
    results = yield [line, *(_exact(k, number) for k in classes for number in numbers)]
    exact = {
        name: [[results[_exact(k, number)][name] for k in classes] for number in numbers]
        for name in _EXACT
    }
    by_classes = [
        Trained(
            Regime(n=n, d=10, k=k, tests=tests),
            list(_TRAINED.values()),
            SHARED if budget.is_toy else _RATES,
        )
        for k in trained_classes
    ]
    yield from search(budget, by_classes, draws=1)
    norms = _Norms(classes, exact, by_classes)
    for one in by_classes:
        one.also = [norms.rate(name) for name in _TRAINED]
    yield from measure(budget, by_classes)
    return _section(norms, results[line].measures, plots)


def _exact(classes: int, number: int) -> Job:
    settings = {"k": classes, "d": 10, "base": BASE, "draw": number}
    return Job("experiments.tree_norms:norms_at_optimum", settings)


def norms_at_optimum(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute Frobenius norms at W* for one draw (a job)."""
    regime = Regime(n=1, d=settings["d"], k=settings["k"], tests=1)
    true = draw(regime, settings["draw"]).true
    other = np.random.default_rng(settings["draw"]).permutation(len(true))
    right, wrong = (
        build_cover_tree(vectors, base=settings["base"], metric="euclidean")
        for vectors in (true, true[other])
    )
    parent = right.center_parent
    above = np.where(parent[:, None] >= 0, true[parent], 0)
    return {
        "W*": float(np.linalg.norm(true)),
        "U*": float(np.linalg.norm(true - above)),
        "V*": least_norm(right.vtree(), true),
        "V* of another metric": least_norm(wrong.vtree(), true),
    }


def least_norm(tree: LabelTree, rows: np.ndarray) -> float:
    """Return the least Frobenius norm of node vectors whose path sums are `rows` [K, d]."""
    paths = np.zeros((tree.num_classes, tree.num_nodes))
    for class_id, node in enumerate(tree.node_of_class.tolist()):
        paths[class_id, [*tree.ancestors(node).tolist(), node]] = 1
    return float(np.sqrt(np.sum(rows * np.linalg.solve(paths @ paths.T, rows))))


def norms_on_a_line(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute ||U*|| and the bound of Lemma 3 (Eq. 13) for k equidistant points on a line (a job).

    The line from -1 to 1 has c = 1 and lambda = B = 1; the base is 2.
    """
    found = []
    for classes in settings["classes"]:
        rows = np.linspace(-1, 1, classes)[:, None]
        parent = build_cover_tree(rows, base=2, metric="euclidean").center_parent
        above = np.where(parent[:, None] >= 0, rows[parent], 0)
        found.append(float(np.linalg.norm(rows - above)))
    bounds = [float(np.sqrt(np.log2(classes) / 2)) for classes in settings["classes"]]
    return {"classes": list(settings["classes"]), "norms": found, "bounds": bounds}


class _Norms:
    """Norms by number of classes, draw by draw, and their growth rates."""

    def __init__(
        self,
        classes: Sequence[int],
        exact: Mapping[str, list[list[float]]],
        by_classes: Sequence[Trained],
    ) -> None:
        self.classes, self.by_classes = classes, by_classes
        self.trained_classes = [one.regime.k for one in by_classes]
        self._exact = exact

    def exact(self, name: str) -> list[list[float]]:
        """Return the norms at W* of one of `_EXACT`, by draw, then by number of classes."""
        return self._exact[name]

    def trained(self, name: str, rate: float) -> list[list[float]]:
        """Return the norms of one of `_TRAINED` at `rate`, by draw, then by number of classes."""
        columns = [one.at(_TRAINED[name], rate, "averaged_norm") for one in self.by_classes]
        return [list(of_draw) for of_draw in zip(*columns, strict=True)]

    def readings(self) -> dict[str, dict[str, float]]:
        """Return the rates of `_TRAINED` for each way to compare them, by description."""
        own = {name: self.rate(name) for name in _TRAINED}
        common = sorted({*own.values(), *SHARED})
        return {
            f"own best rates ({', '.join(f'{name} {rate:g}' for name, rate in own.items())})": own,
            **{f"both at rate {rate:g}": dict.fromkeys(_TRAINED, rate) for rate in common},
        }

    def rate(self, name: str) -> float:
        """Return the learning rate with the best accuracy over all k in the search.

        The norm depends on the learning rate, so all k use the same one.
        """
        arm = _TRAINED[name]

        def reached(rate: float) -> float:
            return sum(sum(one.searched_at(arm, rate)) for one in self.by_classes)

        return max(self.by_classes[0].rates, key=reached)

    def edges(self) -> str:
        """Return the note on best rates at an edge of the grid for the evidence of a claim."""
        rates = self.by_classes[0].rates
        own = {name: self.rate(name) for name in _TRAINED}
        return edge_note(
            [f"{name} ({rate:g})" for name, rate in own.items() if is_at_edge(rate, rates)]
        )


def slopes(classes: Sequence[int], norms: Sequence[Sequence[float]]) -> list[float]:
    """Return the slope of log norm over log k for each draw."""
    return [float(np.polyfit(np.log(classes), np.log(of_draw), 1)[0]) for of_draw in norms]


def _section(norms: _Norms, line: Measures, plots: PlotFolder) -> Section:
    plot = plots.save(
        EXPERIMENT.name,
        _figure(norms),
        title="Frobenius norms of the parameters by number of classes k, at W* (left) and after "
        "training (right).",
        alt_text="Two panels with norms over k and error bars; both axes are logarithmic.",
    )
    regime = norms.by_classes[0].regime
    trained = ", ".join(str(k) for k in norms.trained_classes)
    wrong = mean(slopes(norms.classes, norms.exact("V* of another metric")))
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"The data have d = {regime.d} and sigma = {regime.sigma:g}, and cover trees have "
        f"base {BASE:g}. The parameters U* that represent W* are unique; of the parameters V that "
        "represent W*, V* are those with the least norm. Norms after training "
        f"(k = {trained}; n = {regime.n}) are measured on the averaged weights. W and V each use "
        "a single rate for all k, the one with the best accuracy "
        f"({', '.join(f'{name} {norms.rate(name):g}' for name in _TRAINED)}). "
        f"{setup(norms.by_classes)}",
        claims=[
            _slower_at_optimum(
                norms, "V*", "synthetic II: ||V*|| grows more slowly with k than ||W*||"
            ),
            _slower_at_optimum(
                norms, "U*", "section 5: ||U*|| grows more slowly with k than ||W*||"
            ),
            _slower_trained(norms),
            _smaller_trained(norms),
            _lemma(line),
        ],
        tables=[_at_optimum(norms), _trained(norms), _line(line)],
        plots=[plot],
        remarks=[
            "For any tree, the norm of V* is at most that of W*, because the vectors of all "
            "pseudoclasses can be zero. With a tree built from a metric that is unrelated to W*, "
            f"the norm of V* grows with an exponent of {wrong.text()}. Only the difference "
            "from this exponent is due to the metric.",
            "Norms after training are measured after one pass that starts from zero. They show "
            "how far these few steps move the weights, not how far away the optimum is. At the "
            "same rate, class rows move further with a tree than without one. Whether W or V has "
            "the larger norm depends on the rates, so a claim counts as settled only if the "
            "results at each one's best rate and at all common rates agree.",
            "Synthetic I lists the differences between the paper and the authors' public code.",
        ],
    )


def _slower_at_optimum(norms: _Norms, ours: str, statement: str) -> Claim:
    powers = {name: slopes(norms.classes, norms.exact(name)) for name in ("W*", ours)}
    gap = difference(powers["W*"], powers[ours])
    exponents = " and ".join(f"{name} {mean(of_draw).text()}" for name, of_draw in powers.items())
    return Claim(
        statement,
        verdict(gap),
        f"exponents of k: {exponents}; difference {gap.text()} (paired, {gap.n} draws)",
        Kind.PAPER,
    )


def _slower_trained(norms: _Norms) -> Claim:
    def gap(rates: Mapping[str, float]) -> Mean:
        theirs, ours = (
            slopes(norms.trained_classes, norms.trained(name, rates[name])) for name in ("W", "V")
        )
        return difference(theirs, ours)

    return _trained_claim(
        norms,
        "||V|| grows more slowly than ||W|| after one pass",
        "exponent of k of W minus that of V",
        gap,
    )


def _smaller_trained(norms: _Norms) -> Claim:
    """Compare the norms at the largest number of classes trained."""

    def gap(rates: Mapping[str, float]) -> Mean:
        pairs = zip(*(norms.trained(name, rates[name]) for name in ("W", "V")), strict=True)
        return mean([1 - of_ours[-1] / of_theirs[-1] for of_theirs, of_ours in pairs])

    what = f"1 - ||V|| / ||W|| at k = {norms.trained_classes[-1]}"
    return _trained_claim(norms, "||V|| is smaller than ||W|| after one pass", what, gap)


def _trained_claim(
    norms: _Norms, statement: str, what: str, gap: Callable[[Mapping[str, float]], Mean]
) -> Claim:
    """Claim that `gap` is positive at the arms' own best learning rates and at every common one."""
    found = {words: gap(rates) for words, rates in norms.readings().items()}
    numbers = ", ".join(f"{words} {one.text()}" for words, one in found.items())
    draws = len(norms.by_classes[0].draws)
    return Claim(
        f"synthetic II: {statement}",
        agreed([verdict(one) for one in found.values()]),
        f"{what}: {numbers} (paired, {draws} draws){norms.edges()}",
        Kind.PAPER,
    )


def _lemma(line: Measures) -> Claim:
    rows = zip(line["classes"], line["norms"], line["bounds"], strict=True)
    broken = [k for k, norm, bound in rows if norm > bound]
    words = f"fails for k = {', '.join(map(str, broken))}" if broken else "holds for every k tried"
    return Claim(
        "Lemma 3 (eq 13) bounds ||U*|| where the metric is a line (c = 1)",
        "does not hold" if broken else "holds",
        f"{words}; values of k up to {max(line['classes'])} were tried",
        Kind.PAPER,
    )


def _at_optimum(norms: _Norms) -> Table:
    columns = {name: norms.exact(name) for name in _EXACT}
    return _table("Frobenius norms at W*", norms.classes, columns)


def _trained(norms: _Norms) -> Table:
    columns = {}
    for rate in sorted({*SHARED, *map(norms.rate, _TRAINED)}):
        for name in _TRAINED:
            own = " (own best)" if rate == norms.rate(name) else ""
            columns[f"{name} at {rate:g}{own}"] = norms.trained(name, rate)
    return _table("Norms of trained, averaged weights, by rate", norms.trained_classes, columns)


def _table(
    title: str, classes: Sequence[int], columns: Mapping[str, Sequence[Sequence[float]]]
) -> Table:
    rows = [
        [f"{k}", *(_mean_at(of_name, index).text(2) for of_name in columns.values())]
        for index, k in enumerate(classes)
    ]
    powers = (mean(slopes(classes, of_name)).text() for of_name in columns.values())
    return Table(title, ["k", *columns], [*rows, ["exponent of k", *powers]])


def _mean_at(by_draw: Sequence[Sequence[float]], index: int) -> Mean:
    return mean([of_draw[index] for of_draw in by_draw])


def _line(line: Measures) -> Table:
    rows = [
        [f"{k}", f"{norm:.2f}", f"{bound:.2f}"]
        for k, norm, bound in zip(line["classes"], line["norms"], line["bounds"], strict=True)
    ]
    return Table("Lemma 3 on a line", ["k", "U*", "bound"], rows)


def _figure(norms: _Norms) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    exact = {name: norms.exact(name) for name in _EXACT}
    trained = {
        f"{name} at {norms.rate(name):g}": norms.trained(name, norms.rate(name))
        for name in _TRAINED
    }
    both = (exact, norms.classes, "at W*"), (trained, norms.trained_classes, "trained")
    for panel, (columns, classes, title) in zip(panels, both, strict=True):
        for number, (name, of_name) in enumerate(columns.items()):
            found = [_mean_at(of_name, index) for index in range(len(classes))]
            panel.errorbar(
                classes,
                [one.value for one in found],
                yerr=[one.half for one in found],
                marker=_MARKS[number],
                capsize=3,
                label=name,
            )
        panel.set_xscale("log")
        panel.set_xticks(classes, [str(k) for k in classes])
        panel.xaxis.set_tick_params(which="minor", bottom=False, labelbottom=False)
        panel.set_yscale("log")
        panel.set_title(title)
        panel.set_xlabel("classes k")
        panel.set_ylabel("Frobenius norm")
        panel.legend()
    return figure


EXPERIMENT = Experiment(
    name="000-synthetic-norms",
    paper="000",
    title="Synthetic II: parameter norms (Figure 3)",
    minutes=2,
    full="as many draws of W as in the paper, and training with more classes",
    procedure=_procedure,
)
