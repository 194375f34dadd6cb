"""Paper 003, Table 1: cross entropy compared with the smooth top-5 loss under label noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.comparison import (
    Compared,
    Comparison,
    Rates,
    Run,
    cell,
    grid,
    mean_of,
    values,
)
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import (
    DENSENET_DROPS,
    DENSENET_EPOCHS,
    DENSENET_STEPS,
    Cifar,
    densenet,
    drops,
)
from experiments.papers.intervals import Mean, difference
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, paired
from experiments.papers.shards import CIFAR_100, Dataset

_NOISES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_LOSSES = ("ce", "smooth_topk")
_EVALUATIONS = 10  # number of checkpoints from which cross entropy's best one is selected
# By column of the table: the loss and the checkpoint tested.
_COLUMNS = {
    "ce, best checkpoint": ("ce", "best/test"),
    "ce, last checkpoint": ("ce", "test"),
    "smooth_topk, last checkpoint": ("smooth_topk", "test"),
}
_BASELINE, _OURS = "ce, best checkpoint", "smooth_topk, last checkpoint"
_PRINTED = {_BASELINE: "ce", _OURS: "smooth_topk"}


def _arm(loss: str, noise: float) -> str:
    return f"{loss} {noise:g}"


def _between(steps: int) -> int:
    """Return the number of steps between two evaluations of the stand-in."""
    return max(1, steps // _EVALUATIONS)


@dataclass(frozen=True)
class _Design:
    """An arm is a loss and a noise level.

    As in the paper, cross entropy gets an advantage: the checkpoint with its best top-5 accuracy on
    the validation split is tested, too.
    """

    cifar: Cifar

    def dataset(self, arm: str) -> Dataset:
        return self.cifar.of(noise=float(arm.split()[1]))

    def recipe(self, run: Run) -> Mapping[str, Any]:
        loss = run.arm.split()[0]
        recipe = self.cifar.recipe(run, loss={"kind": loss}, nesterov=True)
        recipe["schedule"] = drops(run.steps, DENSENET_DROPS, 0.1)
        recipe["data"]["eval_split"] = "validation"
        if loss == "ce" and run.split == "test":
            recipe["evaluation"]["every"] = (
                {"epochs": 1} if self.cifar.is_published else {"steps": _between(run.steps)}
            )
            recipe["checkpoint"]["keep_best"] = {"measure": "top5"}
        return recipe


@dataclass(frozen=True)
class _Found:
    compared: Compared
    noises: tuple[float, ...]

    def mean(self, column: str, noise: float, top: str) -> Mean:
        loss, split = _COLUMNS[column]
        return mean_of(self.compared.at_best[_arm(loss, noise)], f"{split}/{top}")

    def cell(self, column: str, noise: float, top: str, *, shared: bool) -> str:
        loss, split = _COLUMNS[column]
        runs = self.compared.at_shared if shared else self.compared.at_best
        return cell(runs[_arm(loss, noise)], f"{split}/{top}", Mean.percent)

    def advantage(self, noise: float, top: str) -> Mean:
        """Return the advantage of the smooth top-5 loss over cross entropy's best checkpoint."""

        def numbers(column: str) -> list[float]:
            loss, split = _COLUMNS[column]
            runs = self.compared.at_best[_arm(loss, noise)]
            return values(runs, f"{split}/{top}", diverged=0.0)

        return difference(numbers(_OURS), numbers(_BASELINE))


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    noises = (0.0, 1.0) if budget.is_toy else _NOISES
    network = densenet(budget, 40, train=2_500)
    comparison = Comparison(
        _Design(network),
        [_arm(loss, noise) for noise in noises for loss in _LOSSES],
        candidates=grid((1.0, 0.3, 0.1, 0.03), (1e-4,)),
        shared=Rates(0.1, 1e-4),
        measures=("top5",),
        also=("test",),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(600, full=DENSENET_STEPS, least=4),
        search_steps=budget.size(200, full=7_030, least=2),
    )
    return _section(network, _Found(compared, noises), plots)


def _section(network: Cifar, found: _Found, plots: PlotFolder) -> Section:
    compared = found.compared
    samples = compared.samples[_arm("ce", found.noises[0])]
    plot = plots.save(
        EXPERIMENT.name,
        _figure(found),
        title="Test accuracy by label noise, best rate of each loss. Dashed: published.",
        alt_text="Two panels with top-5 and top-1 accuracy by the fraction of noisy labels.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{network.description()}. With the given probability, the label of each of the "
            f"{samples['train']:,} training images is replaced with a random label from the same "
            "coarse class. Validation and test labels are correct. The smooth top-k loss uses k = "
            f"5 and temperature 1. {compared.setup()} Rates are chosen separately for each noise "
            "level."
        ),
        claims=_claims(found, network.kind),
        tables=[
            _table("best rate of each loss", found, shared=False),
            _table("shared rate", found, shared=True),
        ],
        plots=[plot],
        remarks=_remarks(network, compared),
    )


def _epochs(network: Cifar, compared: Compared) -> float:
    samples = next(iter(compared.samples.values()))
    return float(compared.steps * network.batch / samples["train"])


def _remarks(network: Cifar, compared: Compared) -> list[str]:
    interval = "after each epoch, as in the paper"
    if not network.is_published:
        interval = f"every {_between(compared.steps)} steps (in the paper, after each epoch)"
    remarks = [
        "The best checkpoint of cross entropy is the one with the highest top-5 accuracy on the "
        f"validation split, which is evaluated {interval}. Its last checkpoint is shown for "
        "comparison. The smooth top-5 loss uses the last checkpoint, as in the paper.",
    ]
    if not network.is_published:
        remarks.append(
            "Wrong labels hurt only a network that memorizes its training labels. The stand-in "
            f"sees each image {_epochs(network, compared):.0f} times, whereas the paper's network "
            f"sees each one {DENSENET_EPOCHS} times."
        )
    return remarks


def _claims(found: _Found, kind: Kind) -> list[Claim]:
    claims = []
    for noise in found.noises:
        note = found.compared.best.edges(*(_arm(loss, noise) for loss in _LOSSES))
        for top in ("top5", "top1"):
            ours = found.advantage(noise, top)
            if noise == 0:
                if top == "top5":
                    continue  # the paper's difference is within a standard deviation
                ours = Mean(-ours.value, ours.half, ours.n)
                statement = "without noise, ce beats smooth_topk (top-1)"
            else:
                statement = f"at label noise {noise:g}, smooth_topk beats ce ({_shown(top)})"
            claims.append(paired(statement, ours, kind, points=True, note=note))
    return claims


def _shown(top: str) -> str:
    return top.replace("top", "top-")


def _table(title: str, found: _Found, *, shared: bool) -> Table:
    rows = []
    for noise in found.noises:
        row = [f"{noise:g}"]
        for top in ("top5", "top1"):
            for column in _COLUMNS:
                ours = found.cell(column, noise, top, shared=shared)
                printed = _published(column, top, noise)
                row.append(ours if printed is None else f"{ours} ({printed:.2f})")
        if not shared:
            chosen = found.compared.best.chosen
            row.append("; ".join(chosen[_arm(loss, noise)].text() for loss in _LOSSES))
        rows.append(row)
    measures = [f"{_shown(top)}: {column}" for top in ("top5", "top1") for column in _COLUMNS]
    header = ["noise", *measures, *([] if shared else ["rate, decay: ce; smooth_topk"])]
    return Table(f"Test accuracy in percent, {title} (published in parentheses)", header, rows)


def _published(column: str, top: str, noise: float) -> float | None:
    if column not in _PRINTED:
        return None
    number: float = published("003", "table 1", _PRINTED[column], top)[noise]
    return number


def _figure(found: _Found) -> Figure:
    figure = Figure(figsize=(8, 4))
    for axes, top in zip(figure.subplots(1, 2), ("top5", "top1"), strict=True):
        _panel(axes, found, top)
    figure.tight_layout()
    return figure


def _panel(axes: Axes, found: _Found, top: str) -> None:
    styles = {_BASELINE: ("tab:blue", "o"), _OURS: ("tab:red", "s")}
    for column, (color, marker) in styles.items():
        means = [found.mean(column, noise, top) for noise in found.noises]
        shown = [100 * one.value for one in means]
        axes.errorbar(
            found.noises,
            shown,
            yerr=[100 * one.half for one in means],
            color=color,
            marker=marker,
            capsize=3,
            label=column,
        )
        table = published("003", "table 1", _PRINTED[column], top)
        axes.plot(
            found.noises,
            [table[noise] for noise in found.noises],
            "--",
            color=color,
            marker=marker,
            markerfacecolor="none",
            alpha=0.5,
            label=f"{_PRINTED[column]}, published",
        )
    axes.set_xlabel("label noise (fraction of training labels)")
    axes.set_ylabel(f"{_shown(top)} test accuracy, %")
    axes.set_ylim(0, 100)
    if top == "top1":
        axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    name="003-label-noise",
    paper="003",
    title="Label noise on CIFAR-100 (Table 1)",
    minutes=6.5,
    full="DenseNet-40-40 on all images for the published number of epochs",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
