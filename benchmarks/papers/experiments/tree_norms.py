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
    Arm,
    Regime,
    Trained,
    draw,
    setup,
)
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Places
from benchmarks.papers.section import Claim, Section, Table, verdict
from heads.tree import LabelTree, build_cover_tree

_EXACT = ("W*", "U*", "V*", "V* of another metric")
_TRAINED = {"W": Arm("ce"), "V": Arm("vtree")}
_RATES = (0.01, 0.1, 1.0)
_MARKS = ("o", "s", "^", "D")


def _course(budget: Budget, album: Album) -> Course:
    classes = (4, 8, 16) if budget.is_toy else (10, 32, 100, 316, 1000)
    trained_classes = classes if budget.is_full else classes[: 2 if budget.is_toy else 4]
    n, tests = (10, 100) if budget.is_toy else (budget.size(300, full=1000, least=100), 10_000)
    by_classes = [
        Trained(Regime(n=n, d=10, k=k, tests=tests), list(_TRAINED.values()), _RATES)
        for k in trained_classes
    ]
    line = Job("experiments.tree_norms:norms_on_a_line", {"classes": [2**i for i in range(1, 12)]})
    results = yield [line]
    numbers = []
    for number in budget.rounds(at_least=50 if budget.is_full else 3, at_most=50):
        numbers.append(number)
        found = yield [
            *(_exact(k, number) for k in classes),
            *(one.job(number) for one in by_classes),
        ]
        results |= found
        for one in by_classes:
            one.add(found[one.job(number)])
    norms = {
        name: [[results[_exact(k, number)][name] for k in classes] for number in numbers]
        for name in _EXACT
    }
    return _section(_Norms(classes, norms, by_classes), results[line].measures, album)


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
        columns = [one.at(arm, self.rate(name), "averaged_norm") for one in self.by_classes]
        return [list(of_draw) for of_draw in zip(*columns, strict=True)]

    def rate(self, name: str) -> float:
        """The rate of the best accuracy over all k: another one at each k would move the norm."""
        arm = _TRAINED[name]
        return max(_RATES, key=lambda rate: sum(sum(one.at(arm, rate)) for one in self.by_classes))

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
            _slower(norms, "U*", "W*", "synthetic II: ||U*|| grows slower with k than ||W*||"),
            _slower(norms, "V", "W", "synthetic II: trained, ||V|| grows slower than ||W||"),
            _smaller(norms, "V*", "W*", len(norms.classes) - 1),
            _smaller(norms, "V", "W", len(norms.trained_classes) - 1),
            _lemma(line),
        ],
        tables=[_at_optimum(norms), _trained(norms), _line(line)],
        pictures=[picture],
        remarks=[
            "The least-norm V* can never be longer than W*, whatever the tree: pseudoclasses at "
            "zero are a choice. With the tree of a metric that has nothing to do with W* it grows "
            f"by a power {wrong.text()} of k, so what lies below that is what the metric gives.",
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


def _smaller(norms: _Norms, ours: str, theirs: str, place: int) -> Claim:
    pairs = zip(norms.of(theirs), norms.of(ours), strict=True)
    by = [1 - of_ours[place] / of_theirs[place] for of_theirs, of_ours in pairs]
    classes = norms.classes if ours == "V*" else norms.trained_classes
    return Claim(
        f"synthetic II: ||{ours}|| is less than ||{theirs}||",
        verdict(mean(by)),
        f"by {mean(by).text()} of it at k = {classes[place]} (paired, {len(by)} draws)",
    )


def _lemma(line: Measures) -> Claim:
    rows = zip(line["classes"], line["norms"], line["bounds"], strict=True)
    broken = [k for k, norm, bound in rows if norm > bound]
    words = f"fails for k up to {max(broken)}" if broken else "held for every k tried"
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
    minutes=1.5,
    full="as many draws of W as the paper, at its n and numbers of classes",
    course=_course,
)
