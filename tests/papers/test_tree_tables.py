"""Table 1 of paper 000 on CIFAR-100 and on tweets, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import tree_cifar, tree_twitter
from experiments.papers.section import Section


@pytest.mark.parametrize(
    ("experiment", "published"),
    [
        pytest.param(tree_cifar.EXPERIMENT, "(52.78)", marks=pytest.mark.slow),
        (tree_twitter.EXPERIMENT, "(20.96)"),
    ],
)
def test_three_losses_are_compared_with_published_results(
    conducted: Callable[[Experiment], Section], experiment: Experiment, published: str
) -> None:
    section = conducted(experiment)
    for table in section.tables[:2]:
        assert [row[0] for row in table.rows] == ["vtree", "ce", "simloss"]
        assert table.rows[0][1].endswith(published)
    assert len(section.claims) == 4
