"""Paper 000, synthetic experiment II (6.1.3, Figure 3): norms of the parameters by k.

At W*, where the U-tree's parameters follow (eq 2) and the V-tree's are not unique: the least norm
of those that give the rows of W*. And of trained weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.papers.budget import Budget
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.synthetic import (
    BASE,
    PUBLISHED_DRAWS,
    SHARED,
    Arm,
    Regime,
    Trained,
    draw,
    measure,
    search,
    setup,
)
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.section import Claim, Section, Table, verdict
from heads.tree import LabelTree, build_cover_tree

_EXACT = ("W*", "U*", "V*", "V* of another metric")
_TRAINED = {"W": Arm("ce"), "V": Arm("vtree")}
_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
_MARKS = ("o", "s", "^", "D")


def _course(budget: Budget, album: Album) -> Course:
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
        one.also = {arm: norms.rate(name) for name, arm in _TRAINED.items()}
    yield from measure(budget, by_classes)
    return _section(norms, results[line].measures, album)


def _exact(classes: int, number: int) -> Job:
    settings = {"k": classes, "d": 10, "base": BASE, "draw": number}
    return Job("experiments.tree_norms:norms_at_optimum", settings)


def norms_at_optimum(settings: Mapping[str, Any], _places: Places) -> Measures:
    """The job of Frobenius norms at W*, of a draw with so many classes."""
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
    """The least Frobenius norm of node vectors whose sums down the paths are `rows` [K, d]."""
    paths = np.zeros((tree.num_classes, tree.num_nodes))
    for class_id, node in enumerate(tree.node_of_class.tolist()):
        paths[class_id, [*tree.ancestors(node).tolist(), node]] = 1
    return float(np.sqrt(np.sum(rows * np.linalg.solve(paths @ paths.T, rows))))


def norms_on_a_line(settings: Mapping[str, Any], _places: Places) -> Measures:
    """The job of Lemma 3 (eq 13): ||U*|| of k even places on a line from -1 to 1, which is c = 1,
    lambda = B = 1, base 2; and its bound."""
    found = []
    for classes in settings["classes"]:
        rows = np.linspace(-1, 1, classes)[:, None]
        parent = build_cover_tree(rows, base=2, metric="euclidean").center_parent
        above = np.where(parent[:, None] >= 0, rows[parent], 0)
        found.append(float(np.linalg.norm(rows - above)))
    bounds = [float(np.sqrt(np.log2(classes) / 2)) for classes in settings["classes"]]
    return {"classes": list(settings["classes"]), "norms": found, "bounds": bounds}


class _Norms:
    """Norms by number of classes, draw by draw, and how fast they grow."""

    def __init__(
        self,
        classes: Sequence[int],
        exact: Mapping[str, list[list[float]]],
        by_classes: Sequence[Trained],
    ) -> None:
        self.classes, self.by_classes = classes, by_classes
        self.trained_classes = [one.regime.k for one in by_classes]
        self._exact = exact

    def of(self, name: str) -> list[list[float]]:
        """Norms by draw, then by number of classes: of `_EXACT`, or of `_TRAINED` at its rate."""
        if name in self._exact:
            return self._exact[name]
        arm = _TRAINED[name]
        rate = self.rate(name)
        columns = [one.at(arm, rate, "averaged_norm") for one in self.by_classes]
        return [list(of_draw) for of_draw in zip(*columns, strict=True)]

    def rate(self, name: str) -> float:
        """The rate of the best accuracy over all k, by the search: another one at each k would move
        the norm."""
        arm = _TRAINED[name]

        def reached(rate: float) -> float:
            return sum(sum(one.searched_at(arm, rate)) for one in self.by_classes)

        return max(self.by_classes[0].rates, key=reached)

    def slopes(self, name: str) -> list[float]:
        """Of log norm over log k, draw by draw."""
        classes = self.classes if name in self._exact else self.trained_classes
        return [
            float(np.polyfit(np.log(classes), np.log(of_draw), 1)[0]) for of_draw in self.of(name)
        ]

    def at(self, name: str, place: int) -> Mean:
        return mean([of_draw[place] for of_draw in self.of(name)])


def _section(norms: _Norms, line: Measures, album: Album) -> Section:
    picture = album.add(
        EXPERIMENT.name,
        _figure(norms),
        title="Frobenius norms of the parameters by number of classes k: at W* (left), trained "
        "(right).",
        words="Two panels of norms with intervals over k, both axes logarithmic.",
    )
    regime = norms.by_classes[0].regime
    trained = ", ".join(str(k) for k in norms.trained_classes)
    wrong = mean(norms.slopes("V* of another metric"))
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"d = {regime.d}, sigma = {regime.sigma:g}, cover trees of base {BASE:g}. Norms at "
        "W*: U* is unique, V* is the least norm that gives W*. Trained (k of "
        f"{trained}; n = {regime.n}): averaged weights, each at one rate for all k, that of the "
        f"best accuracy ({', '.join(f'{name} {norms.rate(name):g}' for name in _TRAINED)}). "
        f"{setup(norms.by_classes)}",
        claims=[
            _slower(norms, "V*", "W*", "synthetic II: ||V*|| grows slower with k than ||W*||"),
            _slower(norms, "U*", "W*", "section 5: ||U*|| grows slower with k than ||W*||"),
            _slower(norms, "V", "W", "synthetic II: ||V|| grows slower than ||W|| after one pass"),
            _smaller(norms, "V", "W"),
            _lemma(line),
        ],
        tables=[_at_optimum(norms), _trained(norms), _line(line)],
        pictures=[picture],
        remarks=[
            "The least-norm V* can never be longer than W*, whatever the tree: pseudoclasses at "
            "zero are a choice. With the tree of a metric that has nothing to do with W* it grows "
            f"by a power {wrong.text()} of k; the metric gives the difference to that.",
            "Trained norms are those after one pass from zero, and tell how far so few steps lead "
            "(a class of a tree moves further at the same rate), not how far away the optimum is.",
        ],
    )


def _slower(norms: _Norms, ours: str, theirs: str, statement: str) -> Claim:
    gap = difference(norms.slopes(theirs), norms.slopes(ours))
    powers = " and ".join(f"{name} {mean(norms.slopes(name)).text()}" for name in (theirs, ours))
    return Claim(
        statement,
        verdict(gap),
        f"powers of k: {powers}; difference {gap.text()} (paired, {gap.n} draws)",
    )


def _smaller(norms: _Norms, ours: str, theirs: str) -> Claim:
    """At the largest number of classes that was trained."""
    pairs = zip(norms.of(theirs), norms.of(ours), strict=True)
    by = mean([1 - of_ours[-1] / of_theirs[-1] for of_theirs, of_ours in pairs])
    return Claim(
        f"synthetic II: ||{ours}|| is less than ||{theirs}|| after one pass",
        verdict(by),
        f"by {by.text()} of it at k = {norms.trained_classes[-1]} (paired, {by.n} draws)",
    )


def _lemma(line: Measures) -> Claim:
    rows = zip(line["classes"], line["norms"], line["bounds"], strict=True)
    broken = [k for k, norm, bound in rows if norm > bound]
    words = f"fails for k of {', '.join(map(str, broken))}" if broken else "held for every k tried"
    return Claim(
        "Lemma 3 (eq 13) bounds ||U*|| where the metric is a line (c = 1)",
        "does not hold" if broken else "holds",
        f"{words}, of k up to {max(line['classes'])}",
    )


def _at_optimum(norms: _Norms) -> Table:
    return _table("Frobenius norms at W*", norms, _EXACT, norms.classes)


def _trained(norms: _Norms) -> Table:
    return _table("Trained, averaged weights", norms, tuple(_TRAINED), norms.trained_classes)


def _table(title: str, norms: _Norms, names: Sequence[str], classes: Sequence[int]) -> Table:
    rows = [
        [f"{k}", *(norms.at(name, place).text(2) for name in names)]
        for place, k in enumerate(classes)
    ]
    rows.append(["power of k", *(mean(norms.slopes(name)).text() for name in names)])
    return Table(title, ["k", *names], rows)


def _line(line: Measures) -> Table:
    rows = [
        [f"{k}", f"{norm:.2f}", f"{bound:.2f}"]
        for k, norm, bound in zip(line["classes"], line["norms"], line["bounds"], strict=True)
    ]
    return Table("Lemma 3 on a line", ["k", "U*", "bound"], rows)


def _figure(norms: _Norms) -> Figure:
    figure = Figure(figsize=(8, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    both = (_EXACT, norms.classes, "at W*"), (tuple(_TRAINED), norms.trained_classes, "trained")
    for panel, (names, classes, title) in zip(panels, both, strict=True):
        for number, name in enumerate(names):
            found = [norms.at(name, place) for place in range(len(classes))]
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
    full="as many draws of W as the paper, and more classes trained",
    course=_course,
)
