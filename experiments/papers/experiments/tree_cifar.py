"""Paper 000, Table 1, on CIFAR-100: the tree loss with label vectors."""

from collections.abc import Mapping
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import Comparison, Rates, Run, grid
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import Cifar, cifar
from experiments.papers.experiments.tree_tables import ARMS, claims, figure, head, table
from experiments.papers.section import Section
from experiments.papers.shards import CIFAR_100, COARSE, Dataset


class _Design:
    def __init__(self, cifar: Cifar) -> None:
        self._cifar = cifar

    def dataset(self, _arm: str) -> Dataset:
        return self._cifar.of(vectors=COARSE)

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return {**self._cifar.recipe(run, loss={"kind": "ce"}), "head": head(run.arm)}


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    data = cifar(budget, {"model_type": "cifar_resnet", "depth": 20}, "ResNet-20", train=10_000)
    comparison = Comparison(
        _Design(data),
        ARMS,
        candidates=grid((0.3, 0.1, 0.03), (1e-4, 1e-3)),
        shared=Rates(0.1, 1e-4),
        measures=("top1",),
    )
    compared = yield from comparison.procedure(
        budget,
        steps=budget.size(300, full=64_000, least=4),
        search_steps=budget.size(300, full=8_000, least=2),
        at_least=6,
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"{data.description()}. The learning rate follows a cosine schedule. "
        f"{compared.setup()}",
        claims=claims("cifar100", compared, data.kind),
        tables=[
            table("CIFAR-100, best rate of each loss", "cifar100", compared, is_best=True),
            table("CIFAR-100, shared rate", "cifar100", compared, is_best=False),
        ],
        plots=[
            plots.save(
                EXPERIMENT.name,
                figure(compared),
                title="CIFAR-100: top-1 accuracy and similarity accuracy (SA) of three losses.",
                alt_text="Points with error bars: tree loss, cross entropy and SimLoss.",
            )
        ],
        remarks=[
            "The paper's label vectors are word2vec vectors (trained on Google News) of the class "
            "names; they are not part of CIFAR-100. Here, label vectors encode the class and its "
            "published coarse class, so SA gives half credit for predicting another class of the "
            "same coarse class. The four classes that the paper omits because they have no "
            "word2vec vector are included."
        ],
    )


EXPERIMENT = Experiment(
    name="000-cifar100",
    paper="000",
    title="Tree loss on CIFAR-100 (Table 1)",
    minutes=2,
    full="ResNet-20 on all images at full resolution for the usual number of steps",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
