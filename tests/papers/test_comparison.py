"""The learning-rate search of a comparison: the grid, its extension, and rates at its edges."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from experiments.papers.budget import Budget
from experiments.papers.comparison import Compared, Comparison, Rates, Run, grid, half_decades
from experiments.papers.job import Job, Result
from experiments.papers.shards import Dataset

_DATASET = Dataset("mnist")


class _Design:
    def dataset(self, _arm: str) -> Dataset:
        return _DATASET

    def recipe(self, run: Run) -> Mapping[str, Any]:
        return {"arm": run.arm, "lr": run.rates.lr, "split": run.split}


def compared(
    comparison: Comparison, reached: Callable[[str, float], Mapping[str, Any]]
) -> Compared:
    """Run the comparison with results invented by `reached`, a function of arm and rate."""
    procedure = comparison.procedure(Budget(1, 1), steps=10, search_steps=5, at_least=2, at_most=2)
    jobs = next(procedure)
    while True:
        try:
            jobs = procedure.send({job: Result(_measures(job, reached), 1.0) for job in jobs})
        except StopIteration as end:
            found: Compared = end.value
            return found


def _measures(job: Job, reached: Callable[[str, float], Mapping[str, Any]]) -> dict[str, Any]:
    if job.function.startswith("shards"):
        return {"train": 1}
    recipe = job.settings["recipe"]
    return dict(reached(recipe["arm"], recipe["lr"]))


def comparison(**changes: Any) -> Comparison:
    settings: dict[str, Any] = {
        "arms": ("ce",),
        "candidates": grid((1.0, 0.1, 0.01), (0.0,)),
        "shared": Rates(0.1, 0.0),
        "measures": ("top1",),
    }
    return Comparison(_Design(), **{**settings, **changes})


def near(best: float) -> Callable[[str, float], Mapping[str, Any]]:
    """Return results whose accuracy is highest at the learning rate `best`."""
    return lambda _arm, lr: {"top1": 1 / (1 + max(lr / best, best / lr))}


@pytest.mark.parametrize(("best", "at_edge"), [(0.1, False), (0.01, True), (1.0, True)])
def test_a_best_rate_at_the_edge_of_its_grid_is_reported(best: float, at_edge: bool) -> None:
    found = compared(comparison(), near(best))
    assert found.best.chosen["ce"].rates.lr == best
    note = f"; the best rate is at an edge of the grid for ce ({best:g})"
    assert found.best.edges("ce") == (note if at_edge else "")
    assert (note in found.setup()) == at_edge
    assert found.best.chosen["ce"].text().endswith("(edge)") == at_edge


def test_a_single_candidate_is_not_a_search_and_has_no_edge() -> None:
    found = compared(comparison(candidates=[Rates(0.1, 0.0)]), near(5.0))
    assert not found.best.chosen["ce"].at_edge


@pytest.mark.parametrize(
    ("best", "expected"), [(0.1, 0.1), (0.3, 0.316), (0.003, 0.00316), (8, 10)]
)
def test_a_bracketed_search_continues_until_both_neighbors_are_worse(
    best: float, expected: float
) -> None:
    found = compared(comparison(refine=True), near(best))
    assert found.refined is not None
    chosen = found.refined.chosen["ce"]
    assert chosen.rates.lr == expected
    assert not chosen.at_edge
    # The results for the paper's own grid are also reported.
    assert found.best.chosen["ce"].rates.lr in (1.0, 0.1, 0.01)
    assert list(found.readings()) == ["grid", "bracketed"]


def test_a_search_that_does_not_bracket_its_best_rate_is_reported() -> None:
    found = compared(comparison(refine=True), lambda _arm, lr: {"top1": lr / (1 + lr)})
    assert found.refined is not None
    assert found.refined.chosen["ce"].at_edge
    assert "edge" in found.refined.edges("ce")


def test_two_half_decades_are_exactly_one_decade() -> None:
    below, above = half_decades(Rates(0.1, 0.5))
    assert (below, above) == (Rates(0.0316, 0.5), Rates(0.316, 0.5))
    assert half_decades(above) == [Rates(0.1, 0.5), Rates(1.0, 0.5)]


def test_each_measure_has_its_own_best_rate() -> None:
    def reached(_arm: str, lr: float) -> Mapping[str, Any]:
        return {"top1": lr, "top5": 1 - lr, "lr": lr}

    found = compared(comparison(measures=("top1", "top5")), reached)
    for measure, best in (("top1", 1.0), ("top5", 0.01)):
        at = found.by[measure]
        assert at.chosen["ce"].rates.lr == best
        assert [run["lr"] for run in at.runs["ce"]] == [best] * 2
    assert found.at_best is found.by["top1"].runs


def test_a_rate_at_which_a_run_diverged_is_not_chosen() -> None:
    def reached(_arm: str, lr: float) -> Mapping[str, Any]:
        return {"diverged": "a loss is inf"} if lr == 1.0 else {"top1": lr}

    assert compared(comparison(), reached).best.chosen["ce"].rates.lr == 0.1
