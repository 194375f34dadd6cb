"""Paper 000, synthetic experiment II (6.1.3, Figure 3) and Lemma 3: norms of the parameters by k.

Norms are computed at W*. The U-tree's parameters follow from Eq. 2. The V-tree's are not unique; of
those that represent W*, the ones with the least norm are used.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.tree_synthetic import BASE
from experiments.papers.intervals import difference, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Section, Table, verdict
from experiments.papers.tree_simulation import FloatArray, Regime, draw, path_counts
from heads.tree import build_cover_tree

_EXACT = ("W*", "U*", "V*", "V* of another metric")
_MARKS = ("o", "s", "^", "D")

# Norms by draw and then by number of classes.
_Norms = Sequence[Sequence[float]]


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    toy = budget.is_toy
    classes = (4, 8, 16) if toy else (10, 32, 100, 316, 1000)
    draws = 2 if toy else budget.size(20, least=10)
    numbers = range(budget.first_seed, budget.first_seed + draws)
    line = Job("experiments.tree_norms:norms_on_a_line", {"classes": [2**i for i in range(1, 12)]})
    results = yield [line, *(_exact(k, number) for k in classes for number in numbers)]
    exact = {
        name: [[results[_exact(k, number)][name] for k in classes] for number in numbers]
        for name in _EXACT
    }
    return _section(classes, exact, results[line].measures, plots)


def _exact(classes: int, number: int) -> Job:
    settings = {"k": classes, "d": 10, "base": BASE, "draw": number}
    return Job("experiments.tree_norms:norms_at_optimum", settings)


def norms_at_optimum(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute Frobenius norms at W* for one draw (a job)."""
    regime = Regime(n=1, d=settings["d"], k=settings["k"])
    true = draw(regime, [settings["draw"]], tests=1).vectors[0]
    other = np.random.default_rng(settings["draw"]).permutation(len(true))
    return {
        "W*": float(np.linalg.norm(true)),
        "U*": utree_norm(true, settings["base"]),
        "V*": least_norm(path_counts("vtree", true, settings["base"]), true),
        "V* of another metric": least_norm(
            path_counts("vtree", true[other], settings["base"]), true
        ),
    }


def utree_norm(rows: FloatArray, base: float) -> float:
    """Return the Frobenius norm of the U-tree's parameters at the class vectors `rows` (Eq. 2)."""
    parent = build_cover_tree(rows, base=base, metric="euclidean").center_parent
    return float(np.linalg.norm(rows - np.where(parent[:, None] >= 0, rows[parent], 0)))


def least_norm(paths: FloatArray, rows: FloatArray) -> float:
    """Return the least Frobenius norm of node vectors whose path sums are `rows` [K, d]."""
    return float(np.sqrt(np.sum(rows * np.linalg.solve(paths @ paths.T, rows))))


def norms_on_a_line(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute ||U*|| and the bound of Lemma 3 (Eq. 13) for k equidistant points on a line (a job).

    The line from -1 to 1 has c = 1 and lambda = B = 1; the base is 2.
    """
    found = [utree_norm(np.linspace(-1, 1, k)[:, None], 2) for k in settings["classes"]]
    bounds = [float(np.sqrt(np.log2(classes) / 2)) for classes in settings["classes"]]
    return {"classes": list(settings["classes"]), "norms": found, "bounds": bounds}


def slopes(classes: Sequence[int], norms: _Norms) -> list[float]:
    """Return the slope of log norm over log k for each draw."""
    return [float(np.polyfit(np.log(classes), np.log(of_draw), 1)[0]) for of_draw in norms]


def _section(
    classes: Sequence[int],
    exact: Mapping[str, _Norms],
    line: Measures,
    plots: PlotFolder,
) -> Section:
    plot = plots.save(
        EXPERIMENT.name,
        _figure(classes, exact),
        title="Frobenius norms of the parameters by number of classes k, at W*.",
        alt_text="Norms over k with error bars; both axes are logarithmic.",
    )
    return Section(
        setup=f"d = 10, cover trees of base {BASE:g}; {len(exact['W*'])} draws.",
        claims=[
            *(_slower(classes, exact, ours) for ours in ("V*", "U*")),
            _lemma(line),
        ],
        tables=[_table(classes, exact), _line(line)],
        plots=[plot],
        remarks=[
            "For any tree, the norm of V* is at most that of W*, because the vectors of all "
            "pseudoclasses can be zero. With a tree built from a metric that is unrelated to W*, "
            "the norm grows with an exponent of "
            f"{mean(slopes(classes, exact['V* of another metric'])).text()}. Only the difference "
            "from this exponent is due to the metric.",
        ],
    )


def _slower(classes: Sequence[int], norms: Mapping[str, _Norms], ours: str) -> Claim:
    powers = {name: slopes(classes, norms[name]) for name in ("W*", ours)}
    gap = difference(powers["W*"], powers[ours])
    exponents = " and ".join(f"{name} {mean(of_draw).text()}" for name, of_draw in powers.items())
    return Claim(
        f"Figure 3: ||{ours}|| grows more slowly with k than ||W*||",
        verdict(gap),
        f"exponents of k: {exponents}; difference {gap.text()} (paired, {gap.n} draws)",
    )


def _lemma(line: Measures) -> Claim:
    rows = zip(line["classes"], line["norms"], line["bounds"], strict=True)
    broken = [k for k, norm, bound in rows if norm > bound]
    words = f"fails for k = {', '.join(map(str, broken))}" if broken else "holds for every k tried"
    return Claim(
        "Lemma 3 (eq 13) bounds ||U*|| where the metric is a line (c = 1)",
        "does not hold" if broken else "holds",
        f"{words}; values of k up to {max(line['classes'])} were tried",
    )


def _table(classes: Sequence[int], norms: Mapping[str, _Norms]) -> Table:
    rows = [
        [f"{k}", *(mean([one[index] for one in of_name]).text(2) for of_name in norms.values())]
        for index, k in enumerate(classes)
    ]
    powers = (mean(slopes(classes, of_name)).text() for of_name in norms.values())
    return Table("Frobenius norms at W*", ["k", *norms], [*rows, ["exponent of k", *powers]])


def _line(line: Measures) -> Table:
    rows = [
        [f"{k}", f"{norm:.2f}", f"{bound:.2f}"]
        for k, norm, bound in zip(line["classes"], line["norms"], line["bounds"], strict=True)
    ]
    return Table("Lemma 3 on a line", ["k", "U*", "bound"], rows)


def _figure(classes: Sequence[int], norms: Mapping[str, _Norms]) -> Figure:
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, of_name) in enumerate(norms.items()):
        found = [mean([one[index] for one in of_name]) for index in range(len(classes))]
        axes.errorbar(
            classes,
            [one.value for one in found],
            yerr=[one.half for one in found],
            marker=_MARKS[number],
            capsize=3,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_xticks(classes, [str(k) for k in classes])
    axes.xaxis.set_tick_params(which="minor", bottom=False, labelbottom=False)
    axes.set_yscale("log")
    axes.set_xlabel("classes k")
    axes.set_ylabel("Frobenius norm")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="000-norms",
    paper="000",
    title="Norms of the parameters (Figure 3, Lemma 3)",
    minutes=1,
    procedure=_procedure,
)
