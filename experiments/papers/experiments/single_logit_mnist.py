"""Paper 002, Tables 1 and 2, on MNIST: which losses produce logits that are useful on their own."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, Comparison, Rates, Run, grid, mean_of
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.experiments.single_logits import LOSSES, missing, slc_section
from experiments.papers.job import Job, Results
from experiments.papers.section import Kind, Table
from experiments.papers.shards import MNIST, Dataset
from experiments.papers.training import training

_DATASET = Dataset("mnist", validation=10_000)
# The paper does not mention a schedule.
CONSTANT = {"kind": "cosine", "final": 1.0}
COSINE = {"kind": "cosine", "final": 0.0}


class _Design:
    """The paper's network, which has two layers of 500 units."""

    def dataset(self, _arm: str) -> Dataset:
        return _DATASET

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return {
            "seed": run.seed,
            "data": {
                "image": {"size": 28, "channels": 1, "mean": [0.1307], "std": [0.3081]},
                "augment": {"crop_area": None, "flip": 0},
                "eval_split": run.split,
            },
            "backbone": {"config": {"model_type": "mlp"}},
            "head": {"loss": {"kind": run.arm}},
            "optimizer": run.rates.optimizer(),
            "schedule": CONSTANT,
            "train": {"duration": {"steps": run.steps}, "global_batch": 64},
            "evaluation": {"batch": 2000, "topk": [1]},
            "checkpoint": {"every": {"steps": 1000}, "keep_last": 1},
        }


def compared_on_mnist(
    budget: Budget, arms: Sequence[str]
) -> Generator[Sequence[Job], Results, Compared]:
    """Compare losses. Losses that several experiments request are measured once."""
    comparison = Comparison(
        _Design(),
        arms,
        # The paper's grid; it does not mention weight decay.
        candidates=grid((1.0, 0.1, 0.01, 0.001), (0.0,)),
        shared=Rates(0.1, 0.0),
        measures=("top1",),
        refine=True,
        all_logits=("ce",),
    )
    return (
        yield from comparison.procedure(
            budget,
            steps=budget.size(3_000, full=100_000, least=4),
            search_steps=budget.size(450, full=3_000, least=2),
        )
    )


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    compared = yield from compared_on_mnist(budget, LOSSES)
    network = "The paper's network with 2 x 500 units is trained on MNIST"
    section = slc_section(EXPERIMENT, "MNIST", network, compared, Kind.PAPER, plots)
    table = yield from _initialization_table(budget)
    return replace(
        section,
        tables=[*section.tables, table],
        remarks=[*section.remarks, _INITIALIZATION_REMARK],
    )


_INITIALIZATION_REMARK = (
    "The paper states neither the initialization nor the schedule, and both matter at a given "
    "rate. Batch norm makes the output of a layer independent of the scale of its weights, so "
    "the effective rate is the rate divided by their squared norm. kway uses the initialization "
    "of He et al. (variance 2 / inputs), but torch's nn.Linear uses a variance of 1 / (3 "
    "inputs). A variance six times smaller is equivalent to a backbone learning rate six times "
    "larger. The last table shows the effect on batch_ce."
)
_SAME_RATE = 0.01
# As multiples of the backbone's learning rate.
_INITIALIZATIONS = {"He et al.": 1, "nn.Linear": 6}


def _initialization_table(budget: Budget) -> Generator[Sequence[Job], Results, Table]:
    """Measure the effect of initialization and schedule at one learning rate of the head."""
    steps = budget.size(1_000, full=1_000, least=4)
    seeds = range(1, 3 if budget.is_toy else 4)
    jobs = {
        (start, name): [_training_with(factor, schedule, steps, seed) for seed in seeds]
        for start, factor in _INITIALIZATIONS.items()
        for name, schedule in (("cosine", COSINE), ("constant", CONSTANT))
    }
    results = yield [job for of_case in jobs.values() for job in of_case]
    rows = []
    for (start, schedule), of_case in jobs.items():
        runs = [results[job].measures for job in of_case]
        rows.append([start, schedule, missing(mean_of(runs, "auprc")).text(4)])
    return Table(
        f"MNIST, batch_ce at rate {_SAME_RATE} after {steps:,} steps, {len(seeds)} seeds",
        ["backbone initialization", "schedule", "1 - AUPRC"],
        rows,
    )


def _training_with(factor: int, schedule: Mapping[str, Any], steps: int, seed: int) -> Job:
    run = Run("batch_ce", Rates(_SAME_RATE, 0.0), steps, seed, split="test")
    optimizer = {
        **run.rates.optimizer(),
        "lr": factor * _SAME_RATE,
        "head": {"lr": _SAME_RATE},
    }
    return training(
        _DATASET, {**_Design().recipe(run), "optimizer": optimizer, "schedule": schedule}
    )


EXPERIMENT = Experiment(
    name="002-mnist",
    paper="002",
    title="Single-logit classification on MNIST (Tables 1 and 2)",
    minutes=22,
    full="the paper's number of steps for each loss",
    wants_gpu=True,
    procedure=_procedure,
    needs=(MNIST,),
)
