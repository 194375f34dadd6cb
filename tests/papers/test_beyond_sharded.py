"""Heads on two ranks compared with one rank, at toy size."""

from collections.abc import Callable

import numpy as np
import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import beyond_sharded
from experiments.papers.section import Section


@pytest.mark.slow
def test_heads_on_two_ranks_match_heads_on_one_rank(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(beyond_sharded.EXPERIMENT)
    same, _ = section.claims
    assert same.verdict == "holds", same.evidence
    assert {row[0] for row in section.tables[0].rows} == {"dense", "vtree", "factored"}


def test_rows_from_all_ranks_are_joined_in_class_order() -> None:
    ranks = [
        {"a ids": np.array([2, 0]), "a rows": np.array([[2.0], [0.0]])},
        {"a ids": np.array([1]), "a rows": np.array([[1.0]])},
    ]
    joined = beyond_sharded.joined(ranks, ["a"])["a"]
    assert joined.tolist() == [[0.0], [1.0], [2.0]]
    assert beyond_sharded.relative_difference([1.0, 4.0], [1.0, 5.0]) == 0.2
