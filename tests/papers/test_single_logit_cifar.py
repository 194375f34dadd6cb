"""Paper 002 on CIFAR-100, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment
from experiments.papers.experiments.single_logit_cifar import EXPERIMENT, slc_cifar
from experiments.papers.experiments.single_logits import LOSSES
from experiments.papers.section import Kind, Section


@pytest.mark.slow
@pytest.mark.slow
def test_all_objectives_are_measured_on_cifar(conducted: Callable[[Experiment], Section]) -> None:
    section = conducted(EXPERIMENT)
    best, shared, improved, all_logits = section.tables
    assert improved.rows[0][1].endswith("(16.8)")  # as published
    assert [row[0] for row in best.rows] == [row[0] for row in shared.rows] == list(LOSSES)
    assert "(0.371)" in best.rows[LOSSES.index("batch_ce")][2]  # as published
    assert [row[0] for row in all_logits.rows][-1] == "ce with all logits"
    assert len(section.claims) == 14
    assert {claim.kind for claim in section.claims} == {Kind.STAND_IN}
    assert "a stand-in for" in section.setup


def test_the_full_budget_uses_the_papers_network_and_all_images() -> None:
    network = slc_cifar(Budget(None, 7))
    assert network.network == {"model_type": "slc_cnn"}
    dataset = network.of()
    assert (dataset.side, dataset.limits, dataset.validation) == (None, {}, 5_000)
    assert "stand-in" not in network.description()
