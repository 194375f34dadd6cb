"""Label trees with other papers' losses, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import beyond_tree
from experiments.papers.section import Section


@pytest.mark.slow
def test_a_tree_is_combined_with_every_loss(conducted: Callable[[Experiment], Section]) -> None:
    section = conducted(beyond_tree.EXPERIMENT)
    best, by_top5, by_auprc, shared = section.tables
    arms = [
        (loss, weights)
        for loss in ("ce", "batch_ce", "smooth_topk")
        for weights in ("dense", "vtree")
    ]
    for table in (best, by_top5, by_auprc, shared):
        assert [tuple(row[:2]) for row in table.rows] == arms
    assert len(section.claims) == 7
