"""Paper 002 on MNIST, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.single_logit_mnist import EXPERIMENT
from experiments.papers.experiments.single_logits import LOSSES
from experiments.papers.section import Kind, Section


@pytest.mark.slow
def test_all_objectives_are_measured_on_mnist(conducted: Callable[[Experiment], Section]) -> None:
    section = conducted(EXPERIMENT)
    best, shared, improved, all_logits, starts = section.tables
    assert improved.rows[0][1].endswith("(82)")  # as published
    assert [row[0] for row in best.rows] == [row[0] for row in shared.rows] == list(LOSSES)
    assert {row[0]: row[1] for row in best.rows}["batch_ce"] == "yes"
    assert "(0.001)" in best.rows[LOSSES.index("batch_ce")][2]  # as published
    assert [row[0] for row in all_logits.rows][-1] == "ce with all logits"
    assert [row[:2] for row in starts.rows] == [
        ["He et al.", "cosine"],
        ["He et al.", "constant"],
        ["nn.Linear", "cosine"],
        ["nn.Linear", "constant"],
    ]
    assert len(section.claims) == 14
    assert {claim.kind for claim in section.claims} == {Kind.PAPER}
