"""Beyond the papers: a V-tree (000) with batch cross-entropy (002) and smooth top-k (003)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.comparison import (
    Best,
    Compared,
    Comparison,
    Rates,
    Run,
    advantage,
    cell,
    grid,
)
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import Cifar, cifar
from experiments.papers.intervals import Mean
from experiments.papers.job import Measures
from experiments.papers.section import Claim, Kind, Section, Table, paired
from experiments.papers.shards import CIFAR_100, Dataset

_LOSSES = ("ce", "batch_ce", "smooth_topk")
_WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"kind": "dense"},
    "vtree": {"kind": "vtree", "tree": {"kind": "hierarchy"}},
}
_ARMS = tuple(f"{weights} {loss}" for loss in _LOSSES for weights in _WEIGHTS)
_MEASURES = {"top1": "top-1", "top5": "top-5", "auprc": "AUPRC of single logits"}
_PUBLISHED = {"model_type": "cifar_resnet", "depth": 20}


@dataclass(frozen=True)
class _Design:
    cifar: Cifar

    def dataset(self, _arm: str) -> Dataset:
        return self.cifar.of()

    def recipe(self, run: Run) -> Mapping[str, Any]:
        weights, loss = run.arm.split()
        recipe = self.cifar.recipe(run, loss={"kind": loss})
        return {**recipe, "head": {**recipe["head"], "weights": _WEIGHTS[weights]}}


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    data = cifar(budget, _PUBLISHED, "ResNet-20", train=10_000)
    comparison = Comparison(
        _Design(data),
        _ARMS,
        candidates=grid((0.3, 0.1, 0.03), (0.0, 5e-4)),
        shared=Rates(0.1, 5e-4),
        measures=tuple(_MEASURES),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(250, full=40_000, least=4),
        search_steps=budget.size(125, full=4_000, least=2),
        at_most=6,
    )
    return _section(data, compared, plots)


def _section(data: Cifar, compared: Compared, plots: PlotFolder) -> Section:
    samples = compared.samples[_ARMS[0]]
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{data.description()}. There are {samples['train']:,} training images. The "
            "pseudoclasses of the V-tree are the coarse classes: the row of a class is the sum "
            f"of its own vector and the vector of its coarse class. {compared.setup()} Each "
            "measure is reported at the rates chosen by that measure."
        ),
        claims=_claims(compared),
        tables=[
            *(
                _table(f"best rates by {name}", reached.runs, reached.chosen)
                for name, reached in zip(_MEASURES.values(), compared.by.values(), strict=True)
            ),
            _table(
                "shared rate",
                compared.at_shared,
                dict.fromkeys(_ARMS, compared.shared),
            ),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                _figure(compared),
                title="V-tree minus dense weights for each measure, at the rates that are best by "
                "that measure.",
                alt_text="Points with error bars for each loss, and a horizontal line at zero.",
            )
        ],
    )


def _claims(compared: Compared) -> list[Claim]:
    found = [
        _claim(
            f"the V-tree of coarse classes improves {_MEASURES[measure]} with {loss}",
            compared,
            (f"vtree {loss}", f"dense {loss}"),
            measure,
        )
        for loss, measure in (("ce", "top1"), ("batch_ce", "top1"), ("smooth_topk", "top5"))
    ]
    for weights in _WEIGHTS:
        for loss, measure in (("batch_ce", "auprc"), ("smooth_topk", "top5")):
            statement = f"{loss} beats ce with {weights} weights ({_MEASURES[measure]})"
            pair = f"{weights} {loss}", f"{weights} ce"
            found.append(_claim(statement, compared, pair, measure))
    return found


def _claim(statement: str, compared: Compared, arms: tuple[str, str], measure: str) -> Claim:
    reached = compared.by[measure]
    ours, theirs = (reached.runs[arm] for arm in arms)
    gain = advantage(ours, theirs, measure)
    return paired(statement, gain, Kind.ADDITIONAL, note=reached.edges(*arms))


def _table(
    title: str, runs: Mapping[str, Sequence[Measures]], rates: Mapping[str, Best | Rates]
) -> Table:
    rows = []
    for arm in _ARMS:
        weights, loss = arm.split()
        cells = [cell(runs[arm], measure, Mean.text) for measure in _MEASURES]
        rows.append([loss, weights, *cells, rates[arm].text()])
    header = ["loss", "weights", *_MEASURES.values(), "rate, decay"]
    return Table(f"CIFAR-100, {title}", header, rows)


def _figure(compared: Compared) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for index, (measure, label) in enumerate(_MEASURES.items()):
        runs = compared.by[measure].runs
        gained = [
            advantage(runs[f"vtree {loss}"], runs[f"dense {loss}"], measure) for loss in _LOSSES
        ]
        axes.errorbar(
            [x + 0.2 * (index - 1) for x in range(len(_LOSSES))],
            [one.value for one in gained],
            yerr=[one.half for one in gained],
            fmt="os^"[index],
            color=("tab:blue", "tab:orange", "tab:green")[index],
            capsize=3,
            label=label,
        )
    axes.axhline(0, color="gray", linewidth=1)
    axes.set_xticks(range(len(_LOSSES)), _LOSSES)
    axes.set_ylabel("V-tree minus dense")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="beyond-tree",
    paper="beyond",
    title="Label trees with batch cross-entropy and smooth top-k",
    minutes=2.5,
    full="ResNet-20 on all images at full resolution",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
