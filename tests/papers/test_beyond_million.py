"""Single logits with very many classes, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import beyond_million
from experiments.papers.section import Section


@pytest.mark.slow
def test_single_logits_of_many_classes_are_compared_with_the_ideal(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(beyond_million.EXPERIMENT)
    table, _ = section.tables
    rows = {row[0]: float(row[1].split()[0]) for row in table.rows}
    assert list(rows) == ["ce", "nce", "quadratic", "ideal"]
    assert rows["ideal"] > 0.9
    assert rows["ce"] > 0.3  # chance level: 0.01
