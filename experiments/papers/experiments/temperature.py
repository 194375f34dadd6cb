"""Paper 003, Figure 2 and Table 6: the smooth top-5 loss by temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.comparison import (
    Compared,
    Comparison,
    Rates,
    Run,
    advantage,
    cell,
    grid,
    mean_of,
)
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import (
    DENSENET_DROPS,
    DENSENET_STEPS,
    Cifar,
    densenet,
    drops,
)
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, paired, verdict
from experiments.papers.shards import CIFAR_100, Dataset, shards_of
from experiments.papers.training import evaluated_logits

if TYPE_CHECKING:
    from torch import Tensor

_TAUS = ("0", "1e-3", "1e-2", "1e-1", "1", "10", "100")  # as in published.yaml
_SHARED = Rates(0.1, 1e-4)
_SMALL, _GOOD, _LARGE = "1e-3", ("1e-2", "1e-1", "1"), "100"


def loss_of(tau: str) -> dict[str, Any]:
    """Return the recipe's loss section; at temperature 0, it is the limit of the loss (Eq. 8)."""
    if float(tau) == 0:
        return {"kind": "topk_hinge", "k": 5}
    return {"kind": "smooth_topk", "k": 5, "tau": float(tau)}


def nonzero_shares(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Measure the fraction of nonzero elements of the loss's derivative by temperature (a job).

    The derivative is taken with respect to the scores of the training images, at the initial
    weights.
    """
    from data.shards.manifest import Manifest
    from experiments.networks import register_networks
    from trainer.recipe import build_recipe
    from trainer.task import build_task
    from trainer.world import open_world

    register_networks()
    shards = shards_of(Dataset(**settings["dataset"]), folders)
    tree = dict(settings["recipe"])
    tree |= {"run": str(folders.work / "run"), "data": {**tree["data"], "shards": str(shards)}}
    recipe = build_recipe(tree, origin="an experiment's recipe")
    manifest = Manifest.load(recipe.data.shards, recipe.data.cache)
    with open_world(recipe.train.device) as world:
        task = build_task(recipe, class_names=manifest.class_names, label_vectors=None, world=world)
        logits, labels, _ = evaluated_logits(recipe, task.train(), world)
    return {tau: nonzero_share(logits.float(), labels, tau) for tau in settings["taus"]}


def nonzero_share(logits: "Tensor", labels: "Tensor", tau: str) -> float:
    """Return the fraction of nonzero elements of the derivative with respect to `logits` [N, K].

    It is computed in the precision of `logits`.
    """
    import torch
    from pydantic import TypeAdapter

    from heads.losses import Block, Loss, LossConfig, Rows

    loss: Loss = TypeAdapter(LossConfig).validate_python(loss_of(tau))
    logits = logits.detach().requires_grad_()
    classes = torch.arange(logits.shape[1], device=logits.device)
    block = Block.of(classes, labels, labels, logits)
    # The mean divides each row by the number of rows, which would make small elements underflow.
    rows = Rows(num_classes=len(classes), labels=labels)
    value = loss.value(loss.merge([loss.statistics(logits, block)]), rows) * len(labels)
    of_logits, of_true = torch.autograd.grad(value, [logits, block.true])
    whole = block.positions.add(of_logits.contiguous(), of_true)
    return float(whole.count_nonzero() / whole.numel())


@dataclass(frozen=True)
class _Design:
    """An arm is a temperature."""

    cifar: Cifar

    def dataset(self, _arm: str) -> Dataset:
        return self.cifar.of()

    def recipe(self, run: Run) -> dict[str, Any]:
        recipe = self.cifar.recipe(run, loss=loss_of(run.arm), nesterov=True)
        recipe["schedule"] = drops(run.steps, DENSENET_DROPS, 0.1)
        return recipe

    def derivative(self, taus: Sequence[str], seed: int) -> Job:
        recipe = self.recipe(Run(taus[-1], _SHARED, 1, seed, split="train"))
        dataset = asdict(self.dataset(""))
        settings = {"dataset": dataset, "recipe": recipe, "taus": list(taus)}
        return Job("experiments.temperature:nonzero_shares", settings)


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    taus = ("0", _SMALL, "1", _LARGE) if budget.is_toy else _TAUS
    design = _Design(densenet(budget, 12, train=5_000, test=3_000))
    comparison = Comparison(
        design,
        taus,
        candidates=grid((1.0, 0.1, 0.01), (1e-4,)),
        shared=_SHARED,
        measures=("top5",),
        also=("train",),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(240, full=DENSENET_STEPS, least=4),
        search_steps=budget.size(240, full=DENSENET_STEPS // 30, least=2),
    )
    jobs = [design.derivative(taus, seed) for seed in range(1, compared.seeds + 1)]
    results = yield jobs
    shares = {tau: [results[job][tau] for job in jobs] for tau in taus}
    return _section(design.cifar, compared, shares, plots)


def _section(
    network: Cifar, compared: Compared, shares: Mapping[str, list[float]], plots: PlotFolder
) -> Section:
    plot = plots.save(
        EXPERIMENT.name,
        _figure(compared, shares),
        title="Top-5 accuracy at the shared rate and at the best rates (left), and nonzero "
        "elements of the derivative (right), by temperature.",
        alt_text="Left: accuracy on training and test images. Right: fraction of nonzero elements.",
    )
    samples = next(iter(compared.samples.values()))
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{network.description()}. There are {samples['train']:,} training images, and k = "
            f"5. At temperature 0, the loss is topk_hinge. {compared.setup()} Derivatives with "
            "respect to the scores are computed in single precision over all training images, at "
            "each seed's initial weights."
        ),
        claims=_claims(compared, shares, network.kind),
        tables=[_table(compared, shares)],
        plots=[plot],
        remarks=[
            "The paper uses one rate for all temperatures; here, it is the shared rate.",
            "The paper's Figure 2a shows the training error by epoch; this page shows only final "
            "accuracies.",
            *_of_stand_in(network),
            "Scores at kway's initial weights are small, so few of their differences are large "
            "compared with the temperature. Derivatives are therefore denser than in networks "
            "whose last layer is initialized with larger weights.",
        ],
    )


def _of_stand_in(network: Cifar) -> list[str]:
    if network.is_published:
        return []
    return [
        "The paper's claim that temperatures at or near 0 give worse results is about a "
        "40-layer network, which `--budget full` trains. Results of the two-layer stand-in may "
        "not carry over to it. Each temperature was tested both at the shared rate and at its own "
        "best rate.",
    ]


def _claims(compared: Compared, shares: Mapping[str, list[float]], kind: Kind) -> list[Claim]:
    claims = []
    for name, runs in (("shared rate", compared.at_shared), ("best rates", compared.at_best)):
        for tau in (one for one in _GOOD if one in runs):
            for small in ("0", _SMALL):
                ours = advantage(runs[tau], runs[small], "train/top5")
                note = compared.best.edges(tau, small) if runs is compared.at_best else ""
                claims.append(
                    paired(
                        f"temperature {tau} beats temperature {small} (training top-5, {name})",
                        ours,
                        kind,
                        points=True,
                        note=note,
                    )
                )
    low, high = shares[_SMALL], shares[_LARGE]
    denser = difference(high, low)
    claims.append(
        Claim(
            f"derivatives are denser at temperature {_LARGE} than at {_SMALL}",
            verdict(denser),
            f"{mean(high).percent()}% vs. {mean(low).percent()}% nonzero elements",
            kind,
        )
    )
    return claims


def _table(compared: Compared, shares: Mapping[str, list[float]]) -> Table:
    rows = []
    for tau, share in shares.items():
        cells = []
        for measure, printed in (("train/top5", "training"), ("top5", "testing")):
            ours = cell(compared.at_shared[tau], measure, Mean.percent)
            cells.append(f"{ours} ({published('003', 'table 6', printed)[tau]:.2f})")
        best = compared.at_best[tau]
        cells += [cell(best, measure, Mean.percent) for measure in ("train/top5", "top5")]
        rows.append([tau, *cells, compared.best.chosen[tau].text(), mean(share).percent()])
    shared = f"rate {compared.shared.lr:g}"
    return Table(
        "Top-5 accuracy in percent (published in parentheses), and nonzero derivatives",
        [
            "temperature",
            f"training, {shared}",
            f"test, {shared}",
            "training, best rate",
            "test, best rate",
            "best rate, decay",
            "nonzero, %",
        ],
        rows,
    )


def _figure(compared: Compared, shares: Mapping[str, list[float]]) -> Figure:
    figure = Figure(figsize=(9, 4))
    left, right = figure.subplots(1, 2)
    positions = range(len(shares))
    for measure, printed, color, marker in (
        ("train/top5", "training", "tab:blue", "o"),
        ("top5", "testing", "tab:red", "s"),
    ):
        for runs, line, rates in (
            (compared.at_shared, "-", "shared rate"),
            (compared.at_best, ":", "best rates"),
        ):
            means = [mean_of(runs[tau], measure) for tau in shares]
            left.errorbar(
                positions,
                [100 * one.value for one in means],
                yerr=[100 * one.half for one in means],
                color=color,
                marker=marker,
                linestyle=line,
                capsize=3,
                label=f"{printed}, {rates}",
            )
        numbers = [published("003", "table 6", printed)[tau] for tau in shares]
        left.plot(
            positions,
            numbers,
            "--",
            color=color,
            marker=marker,
            markerfacecolor="none",
            alpha=0.5,
            label=f"{printed}, published",
        )
    nonzero = [mean(share) for share in shares.values()]
    right.errorbar(
        positions,
        [100 * one.value for one in nonzero],
        yerr=[100 * one.half for one in nonzero],
        color="k",
        marker="o",
        capsize=3,
    )
    left.set_ylabel("top-5 accuracy, %")
    right.set_ylabel("nonzero elements of the derivative, %")
    left.legend(fontsize=7)
    for axes in (left, right):
        axes.set_xticks(positions, list(shares))
        axes.set_xlabel("temperature")
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    return figure


EXPERIMENT = Experiment(
    name="003-temperature",
    paper="003",
    title="The temperature of the smooth top-5 loss (Figure 2b, Table 6)",
    minutes=2.5,
    full="DenseNet-40-12 on all images for the published number of epochs",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
