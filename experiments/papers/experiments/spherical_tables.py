"""Paper 004's error rates on MNIST and CIFAR-100: spherical losses compared with cross entropy."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, Reached, advantage, cell, mean_of
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.loss_settings import loss_settings
from experiments.papers.experiments.single_logit_cifar import compared_on_cifar, slc_cifar
from experiments.papers.experiments.single_logit_mnist import compared_on_mnist
from experiments.papers.intervals import Mean
from experiments.papers.job import Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table
from experiments.papers.shards import CIFAR_100, MNIST

_LOSSES = ("ce", "taylor_softmax", "spherical_softmax", "spherical_bound")
_NAMES = {"mnist": "MNIST", "cifar100": "CIFAR-100"}
# By dataset: pairs of the better and the worse loss.
_CLAIMED = {
    "mnist": (("taylor_softmax", "ce"), ("ce", "spherical_softmax")),
    "cifar100": (("ce", "taylor_softmax"), ("ce", "spherical_softmax")),
}


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    on_mnist = yield from compared_on_mnist(budget, _LOSSES)
    on_cifar = yield from compared_on_cifar(budget, _LOSSES)
    found = {"mnist": on_mnist, "cifar100": on_cifar}
    settings = [f"{loss} {own}" for loss in _LOSSES if (own := loss_settings(loss))]
    plot = plots.save(
        EXPERIMENT.name,
        _figure(found),
        title="Test error rate, best rate of each loss. Hollow: published.",
        alt_text="Points with error bars for four losses, one panel each for MNIST and CIFAR-100.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"A network with 2 x 500 units is trained on MNIST. {on_mnist.setup()} "
            f"{slc_cifar(budget).description()}. {on_cifar.setup()}"
        ),
        claims=_claims(found, {"mnist": Kind.PAPER, "cifar100": slc_cifar(budget).kind}),
        tables=[_table(name, compared) for name, compared in found.items()],
        plots=[plot],
        remarks=[
            "The available text of the paper does not specify its networks, so this experiment "
            "reuses the networks and runs of paper 002.",
            "The paper leaves the upper bound out of its tables because the bound's results were "
            f"far worse; the tables on this page include it. Settings: {'; '.join(settings)}.",
            "The paper also has results for CIFAR-10 and Penn Treebank, which were not run here.",
        ],
    )


def _claims(found: Mapping[str, Compared], kinds: Mapping[str, Kind]) -> list[Claim]:
    claims = []
    for name, pairs in _CLAIMED.items():
        others = [loss for loss in _LOSSES if loss != "spherical_bound"]
        for better, worse in [*pairs, *((loss, "spherical_bound") for loss in others)]:
            statement = f"{better} has a lower error rate than {worse} ({_NAMES[name]})"
            claims.append(
                found[name].judge(
                    statement,
                    partial(_gain, better, worse),
                    (better, worse),
                    kinds[name],
                    points=True,
                )
            )
    return claims


def _gain(better: str, worse: str, reached: Reached) -> Mean:
    return advantage(reached.runs[better], reached.runs[worse], "top1")


def _table(name: str, compared: Compared) -> Table:
    rows = []
    searches = compared.readings()
    for loss in _LOSSES:
        printed = published("004", name).get(loss)
        in_parentheses = "" if printed is None else f" ({printed:g})"
        row = [loss]
        for reached in searches.values():
            row += [_errors(reached.runs[loss]) + in_parentheses, reached.chosen[loss].text()]
        rows.append([*row, _errors(compared.at_shared[loss])])
    header = ["loss"]
    for search in searches:
        header += [f"best rate, {search}", "rate, decay"]
    header.append(f"shared rate and decay {compared.shared.text()}")
    return Table(f"{_NAMES[name]}: error rate in percent (published in parentheses)", header, rows)


def _errors(runs: Sequence[Measures]) -> str:
    return cell(runs, "top1", lambda right: _error(right).percent(2))


def _error(right: Mean) -> Mean:
    return Mean(1 - right.value, right.half, right.n)


def _figure(found: Mapping[str, Compared]) -> Figure:
    figure = Figure(figsize=(8, 3))
    for axes, (name, compared) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for index, loss in enumerate(_LOSSES):
            ours = _error(mean_of(compared.at_best[loss], "top1"))
            axes.errorbar(
                100 * ours.value, index, xerr=100 * ours.half, fmt="o", color="k", capsize=3
            )
            if (printed := published("004", name).get(loss)) is not None:
                axes.plot(printed, index, "s", color="tab:red", markerfacecolor="white")
        axes.set_yticks(range(len(_LOSSES)), _LOSSES)
        axes.set_ylim(len(_LOSSES) - 0.5, -0.5)
        axes.set_xlabel(f"error rate on {_NAMES[name]}, %")
    first = figure.axes[0]
    first.plot([], [], "ok", label="measured")
    first.plot([], [], "s", color="tab:red", markerfacecolor="white", label="published")
    first.legend(fontsize=8)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="004-tables",
    paper="004",
    title="Spherical losses on MNIST and CIFAR-100 (error rates)",
    minutes=1,
    full="the networks and numbers of steps of paper 002",
    wants_gpu=True,
    procedure=_procedure,
    needs=(MNIST, CIFAR_100),
)
