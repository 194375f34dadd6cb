"""Paper 002, Tables 1 and 2, on CIFAR-100: which losses produce logits useful on their own."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, Comparison, Rates, Run, grid
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.cifar import Cifar, cifar
from experiments.papers.experiments.single_logits import LOSSES, slc_section
from experiments.papers.job import Job, Results
from experiments.papers.shards import CIFAR_100, Dataset


@dataclass(frozen=True)
class _Design:
    """An arm is the name of a loss."""

    cifar: Cifar

    def dataset(self, _arm: str) -> Dataset:
        return self.cifar.of()

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return self.cifar.recipe(run, loss={"kind": run.arm})


def slc_cifar(budget: Budget) -> Cifar:
    """Return the setup with the paper's CNN (six convolutions, a dense layer), or the stand-in."""
    return cifar(budget, {"model_type": "slc_cnn"}, "the paper's CNN with six convolutions")


def compared_on_cifar(
    budget: Budget, arms: Sequence[str]
) -> Generator[Sequence[Job], Results, Compared]:
    """Compare losses at the rates that the paper searches.

    Losses that several experiments request are measured once.
    """
    comparison = Comparison(
        _Design(slc_cifar(budget)),
        arms,
        candidates=grid((1.0, 0.1, 0.01, 0.001), (0.0,)),
        shared=Rates(0.1, 0.0),
        measures=("top1",),
        all_logits=("ce",),
    )
    return (
        yield from comparison.procedure(
            budget,
            steps=budget.size(300, full=100_000, least=4),
            search_steps=budget.size(300, full=3_000, least=2),
        )
    )


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    compared = yield from compared_on_cifar(budget, LOSSES)
    network = slc_cifar(budget)
    return slc_section(
        EXPERIMENT, "CIFAR-100", network.description(), compared, network.kind, plots
    )


EXPERIMENT = Experiment(
    name="002-cifar100",
    paper="002",
    title="Single-logit classification on CIFAR-100 (Tables 1 and 2)",
    minutes=5,
    full="the paper's CNN on all images for the paper's number of steps",
    wants_gpu=True,
    procedure=_procedure,
    needs=(CIFAR_100,),
)
