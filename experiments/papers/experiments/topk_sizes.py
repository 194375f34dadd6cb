"""Paper 003, trend of Table 2: cross entropy and the smooth top-5 loss by training set size, on
CIFAR-100 instead of ImageNet."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, Comparison, Rates, Run, advantage, cell, values
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import (
    DENSENET_DROPS,
    DENSENET_STEPS,
    Cifar,
    densenet,
    drops,
)
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.published import published
from experiments.papers.section import Claim, Kind, Section, Table, paired
from experiments.papers.shards import CIFAR_100, Dataset

_LOSSES = ("ce", "smooth_topk")
# Number of ImageNet images in the paper, in thousands, by fraction of the training set.
_PRINTED = {1.0: 1230, 0.5: 640, 0.25: 320, 0.1: 128, 0.05: 64}
_TAU = 0.1
_TRAIN, _HELD_OUT = 20_000, 5_000
_CIFAR_TRAIN = 50_000
# The paper's learning rates for cross entropy and for the smooth loss. The other candidates lie
# between and below them.
_PAPERS = {"ce": Rates(0.1, 1e-4), "smooth_topk": Rates(1.0, 2.5e-5)}
_CANDIDATES = (*_PAPERS.values(), Rates(0.3, 5e-5), Rates(0.03, 1e-4))


def _arm(loss: str, share: float) -> str:
    return f"{loss} {share:g}"


@dataclass(frozen=True)
class _Design:
    """An arm is a loss and a fraction of the `train` training images."""

    cifar: Cifar
    train: int

    def dataset(self, arm: str) -> Dataset:
        limit = max(1, round(float(arm.split()[1]) * self.train))
        return self.cifar.of(limits={**self.cifar.limits, "train": limit})

    def recipe(self, run: Run) -> Mapping[str, Any]:
        kind = run.arm.split()[0]
        loss = {"kind": kind} if kind == "ce" else {"kind": kind, "tau": _TAU}
        recipe = self.cifar.recipe(run, loss=loss, nesterov=True)
        # In the paper, training takes the same number of epochs for every size. The stand-in would
        # then take very few steps at small sizes, so its number of steps is fixed.
        share = float(run.arm.split()[1]) if self.cifar.is_published else 1.0
        steps = max(1, round(run.steps * share))
        recipe["train"]["duration"] = {"steps": steps}
        recipe["schedule"] = drops(steps, DENSENET_DROPS, 0.1)
        return recipe


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    shares = (1.0, 0.05) if budget.is_toy else tuple(_PRINTED)
    network = densenet(budget, 12, train=_TRAIN, test=3_000)
    train = network.limits.get("train", _CIFAR_TRAIN - _HELD_OUT)
    comparison = Comparison(
        _Design(network, train),
        [_arm(loss, share) for share in shares for loss in _LOSSES],
        candidates=_CANDIDATES,
        shared=_PAPERS["ce"],
        measures=("top5",),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(160, full=DENSENET_STEPS, least=4),
        search_steps=budget.size(160, full=DENSENET_STEPS // 30, least=2),
    )
    return _section(network, shares, compared, plots)


def _section(
    network: Cifar, shares: tuple[float, ...], compared: Compared, plots: PlotFolder
) -> Section:
    plot = plots.save(
        EXPERIMENT.name,
        _figure(shares, compared),
        title="Top-5 accuracy of the smooth top-5 loss minus that of cross entropy, best rate of "
        "each loss.",
        alt_text="Differences with error bars by training set size; a dashed line for the paper.",
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=(
            f"{network.description()}. The paper uses ResNet-18 on ImageNet. The smooth top-k "
            f"loss uses k = 5 and temperature {_TAU:g}. {compared.setup()} {_length(network)} "
            "Rates are chosen separately for each size."
        ),
        claims=_claims(shares, compared, network.kind),
        tables=[_table(shares, compared)],
        plots=[plot],
        remarks=[
            "The fractions of the training set are the same as in the paper, but the images are "
            "not: the published numbers are for ImageNet, so only their trend can be compared.",
            "To reproduce Table 2 itself, you need ImageNet shards (`kway shard`), a subset of "
            "each size and days of GPU time. Use the recipe imagenet-resnet50-smooth-topk and set "
            "backbone.config to ResNet-18: `{model_type: resnet, layer_type: basic, depths: [2, "
            "2, 2, 2], hidden_sizes: [64, 128, 256, 512]}`. `python -m experiments.papers` does "
            "not run Table 2 at any budget; with `--budget full`, it trains DenseNet-40-12 on "
            "fractions of CIFAR-100.",
            "The paper uses class-balanced subsets, drops the learning rate three times, and tests "
            "the checkpoint that is best on the validation split. In this experiment, the subsets "
            "are random, the learning rate drops as in the paper's CIFAR-100 runs, and the final "
            "weights are tested.",
        ],
    )


def _length(network: Cifar) -> str:
    if network.is_published:
        return (
            "Training takes the same number of epochs for every size, so smaller sizes take fewer "
            "steps."
        )
    return (
        "Training takes the same number of steps for every size; in the paper, it takes the same "
        "number of epochs."
    )


def _claims(shares: tuple[float, ...], compared: Compared, kind: Kind) -> list[Claim]:
    def by_seed(share: float) -> list[float]:
        smooth, ce = (
            values(compared.at_best[_arm(loss, share)], "top5", diverged=0.0)
            for loss in ("smooth_topk", "ce")
        )
        return [a - b for a, b in zip(smooth, ce, strict=True)]

    def edges(*shares: float) -> str:
        return compared.best.edges(*(_arm(loss, share) for share in shares for loss in _LOSSES))

    claims = []
    for share in shares:
        ours = mean(by_seed(share))
        # The paper calls the difference with all images insignificant.
        if share < 1:
            claims.append(
                paired(
                    f"smooth_topk beats ce with {share:.0%} of the training images (top-5)",
                    ours,
                    kind,
                    points=True,
                    note=edges(share),
                )
            )
    few, many = min(shares), max(shares)
    claims.append(
        paired(
            f"the advantage of smooth_topk over ce is larger with {few:.0%} than with {many:.0%} "
            "of the images (top-5)",
            difference(by_seed(few), by_seed(many)),
            kind,
            points=True,
            note=edges(few, many),
        )
    )
    return claims


def _table(shares: tuple[float, ...], compared: Compared) -> Table:
    rows = []
    for share in shares:
        arms = [_arm(loss, share) for loss in _LOSSES]
        images = compared.samples[arms[0]]["train"]
        rows.append(
            [
                f"{share:.0%}",
                f"{images:,}",
                *(cell(compared.at_best[arm], "top5", Mean.percent) for arm in arms),
                *(cell(compared.at_shared[arm], "top5", Mean.percent) for arm in arms),
                *(compared.best.chosen[arm].text() for arm in arms),
                *(f"{published('003', 'table 2', loss)[_PRINTED[share]]:.2f}" for loss in _LOSSES),
            ]
        )
    header = ["fraction", "images"]
    for column in ("best rate", f"at {compared.shared.text()}", "rate, decay", "published"):
        header += [f"{loss}, {column}" for loss in _LOSSES]
    return Table(
        "Top-5 accuracy in percent by training set size (published: ImageNet)", header, rows
    )


def _figure(shares: tuple[float, ...], compared: Compared) -> Figure:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    ours = [
        advantage(
            compared.at_best[_arm("smooth_topk", share)],
            compared.at_best[_arm("ce", share)],
            "top5",
        )
        for share in shares
    ]
    percents = [100 * share for share in shares]
    axes.errorbar(
        percents,
        [100 * one.value for one in ours],
        yerr=[100 * one.half for one in ours],
        fmt="o-",
        color="tab:blue",
        capsize=3,
        label="measured (CIFAR-100)",
    )
    table = published("003", "table 2")
    printed = [
        table["smooth_topk"][_PRINTED[share]] - table["ce"][_PRINTED[share]] for share in shares
    ]
    axes.plot(percents, printed, "s--", color="tab:red", label="published (ImageNet)")
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(percents, [f"{one:g}" for one in percents])
    axes.minorticks_off()
    axes.set_xlabel("fraction of the training set, %")
    axes.set_ylabel("top-5 difference, smooth_topk - ce, points")
    axes.legend()
    return figure


EXPERIMENT = Experiment(
    name="003-sizes",
    paper="003",
    title="Top-5 accuracy by training set size (trend of Table 2)",
    minutes=2,
    full="DenseNet-40-12 on fractions of CIFAR-100 (Table 2 itself needs ImageNet)",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
