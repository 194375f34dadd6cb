"""Paper 002, Tables 1 and 2, on MNIST: which losses give logits that mean something alone."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from benchmarks.papers.budget import Budget
from benchmarks.papers.comparison import Compared, Comparison, Rates, Run, grid
from benchmarks.papers.experiment import Album, Course, Experiment
from benchmarks.papers.experiments.single_logits import LOSSES, slc_section
from benchmarks.papers.job import Job, Results
from benchmarks.papers.section import Kind
from benchmarks.papers.shards import MNIST, Dataset

_DATASET = Dataset("mnist", validation=10_000)


class _Design:
    """The paper's network of two layers of 500 units."""

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
            "train": {"duration": {"steps": run.steps}, "global_batch": 64},
            "evaluation": {"batch": 2000, "topk": [1]},
            "checkpoint": {"every": {"steps": 1000}, "keep_last": 1},
        }


def compared_on_mnist(
    budget: Budget, arms: Sequence[str]
) -> Generator[Sequence[Job], Results, Compared]:
    """Losses compared; those that several experiments ask for are measured once."""
    comparison = Comparison(
        _Design(),
        arms,
        # The paper's own grid; it mentions no weight decay.
        candidates=grid((1.0, 0.1, 0.01, 0.001), (0.0,)),
        shared=Rates(0.1, 0.0),
        measures=("top1",),
        refine=True,
        all_logits=("ce",),
    )
    return (
        yield from comparison.course(
            budget,
            steps=budget.size(1_000, full=100_000, least=4),
            search_steps=budget.size(150, full=3_000, least=2),
            # Max-margin differs much from seed to seed.
            at_least=5,
        )
    )


def _course(budget: Budget, album: Album) -> Course:
    compared = yield from compared_on_mnist(budget, LOSSES)
    network = "The paper's network of 2 x 500 units"
    return slc_section(EXPERIMENT, "MNIST", network, compared, Kind.PAPER, album)


EXPERIMENT = Experiment(
    name="002-mnist",
    paper="002",
    title="Single-logit classification on MNIST (Tables 1 and 2)",
    minutes=14,
    full="the paper's steps, for each loss",
    wants_gpu=True,
    course=_course,
    needs=(MNIST,),
)
