"""Paper 000, Table 1, on CIFAR-100: the tree loss with label vectors."""

from collections.abc import Mapping
from typing import Any

from benchmarks.papers.budget import Budget
from benchmarks.papers.comparison import Comparison, Rates, Run, grid
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.cifar import Cifar, cifar
from benchmarks.papers.experiments.tree_tables import ARMS, claims, figure, head, table
from benchmarks.papers.section import Section
from benchmarks.papers.shards import CIFAR_100, COARSE, Dataset


class _Design:
    def __init__(self, cifar: Cifar) -> None:
        self._cifar = cifar

    def dataset(self, _arm: str) -> Dataset:
        return self._cifar.of(vectors=COARSE)

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return {**self._cifar.recipe(run, loss={"kind": "ce"}), "head": head(run.arm)}


def _course(budget: Budget, album: Album) -> Course:
    data = cifar(budget, {"model_type": "cifar_resnet", "depth": 20}, "ResNet-20", train=10_000)
    comparison = Comparison(
        _Design(data),
        ARMS,
        candidates=grid((0.3, 0.1, 0.03), (1e-4, 1e-3)),
        shared=Rates(0.1, 1e-4),
        measures=("top1",),
    )
    compared = yield from comparison.course(
        budget,
        steps=budget.size(300, full=64_000, least=4),
        search_steps=budget.size(300, full=8_000, least=2),
        at_least=6,
    )
    return Section(
        name=EXPERIMENT.name,
        paper=EXPERIMENT.paper,
        title=EXPERIMENT.title,
        setup=f"{data.words()}. The rate falls as a cosine. {compared.setup()}",
        claims=claims("cifar100", compared, data.kind),
        tables=[
            table("CIFAR-100, each at its best rates", "cifar100", compared, is_best=True),
            table("CIFAR-100, all at the shared rate", "cifar100", compared, is_best=False),
        ],
        pictures=[
            album.add(
                EXPERIMENT.name,
                figure(compared),
                title="CIFAR-100: top-1 and similarity accuracy of three losses.",
                words="Points with intervals: tree loss, cross-entropy and SimLoss.",
            )
        ],
        remarks=[
            "The paper's label vectors are word2vec's of the class names, of GoogleNews, which is "
            "not among the data; ours tell a class and its published coarse class, so that SA "
            "counts half for a class of the same coarse one. The four classes that the paper "
            "leaves out for want of a vector are here."
        ],
    )


EXPERIMENT = Experiment(
    name="000-cifar100",
    paper="000",
    title="Tree loss on CIFAR-100 (Table 1)",
    minutes=2,
    full="ResNet-20 on all pictures, at their size, for the usual steps",
    wants_gpu=True,
    course=_course,
    needs=(CIFAR_100,),
)
