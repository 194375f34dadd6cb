"""The tables of paper 004 at toy size, and the runs that they share with other experiments."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment
from experiments.papers.experiments.single_logit_cifar import compared_on_cifar
from experiments.papers.experiments.single_logit_mnist import compared_on_mnist
from experiments.papers.experiments.spherical_tables import EXPERIMENT
from experiments.papers.job import Job, Result
from experiments.papers.section import Section


@pytest.mark.slow
def test_spherical_losses_are_compared_on_both_datasets(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    mnist, cifar = section.tables
    losses = ["ce", "taylor_softmax", "spherical_softmax", "spherical_bound"]
    assert [row[0] for row in mnist.rows] == [row[0] for row in cifar.rows] == losses
    assert mnist.rows[1][1].endswith("(0.785)")
    assert cifar.rows[1][1].endswith("(33.1)")
    assert "(" not in mnist.rows[-1][1]  # the paper has no result for the bound
    assert len(section.claims) == 10


@pytest.mark.parametrize("compared", [compared_on_mnist, compared_on_cifar])
def test_runs_are_shared_with_the_single_logit_experiments(
    compared: Callable[[Budget, Sequence[str]], Generator[Sequence[Job], Any, Any]],
) -> None:
    theirs = _all_jobs(compared(Budget(6, 12), ("ce", "bce")))
    assert _all_jobs(compared(Budget(1.5, 3), ("ce",))) < theirs


def _all_jobs(procedure: Generator[Sequence[Job], Any, Any]) -> set[Job]:
    """Return all jobs that a procedure requests when every job returns the same invented result."""
    found: set[Job] = set()
    jobs = next(procedure)
    while True:
        found |= set(jobs)
        try:
            jobs = procedure.send({job: Result({"top1": 0.5}, 1.0) for job in jobs})
        except StopIteration:
            return found
