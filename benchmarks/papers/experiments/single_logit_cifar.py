"""Paper 002, Tables 1 and 2, on CIFAR-100: which losses give logits that mean something alone."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.budget import Budget
from benchmarks.papers.comparison import Compared, Comparison, Rates, Run, grid
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.cifar import Cifar, cifar
from benchmarks.papers.experiments.single_logits import LOSSES, slc_section
from benchmarks.papers.job import Job, Results
from benchmarks.papers.shards import CIFAR_100, Dataset


@dataclass(frozen=True)
class _Design:
    """An arm is a loss by its name."""

    cifar: Cifar

    def dataset(self, _arm: str) -> Dataset:
        return self.cifar.of()

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return self.cifar.recipe(run, loss={"kind": run.arm})


def slc_cifar(budget: Budget) -> Cifar:
    """The paper's six convolutions and a dense layer, or the stand-in."""
    return cifar(budget, {"model_type": "slc_cnn"}, "the paper's CNN of six convolutions")


def compared_on_cifar(
    budget: Budget, arms: Sequence[str]
) -> Generator[Sequence[Job], Results, Compared]:
    """Losses compared; those that several experiments ask for are measured once. The rates are
    those that the paper searches."""
    comparison = Comparison(
        _Design(slc_cifar(budget)),
        arms,
        candidates=grid((1.0, 0.1, 0.01, 0.001), (0.0,)),
        shared=Rates(0.1, 0.0),
        measures=("top1",),
        all_logits=("ce",),
    )
    return (
        yield from comparison.course(
            budget,
            steps=budget.size(300, full=100_000, least=4),
            search_steps=budget.size(300, full=3_000, least=2),
        )
    )


def _course(budget: Budget, album: Album) -> Course:
    compared = yield from compared_on_cifar(budget, LOSSES)
    network = slc_cifar(budget)
    return slc_section(EXPERIMENT, "CIFAR-100", network.words(), compared, network.kind, album)


EXPERIMENT = Experiment(
    name="002-cifar100",
    paper="002",
    title="Single-logit classification on CIFAR-100 (Tables 1 and 2)",
    minutes=5,
    full="the paper's CNN on all pictures for its steps",
    wants_gpu=True,
    course=_course,
    needs=(CIFAR_100,),
)
