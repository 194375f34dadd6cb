"""Paper 003 with several training set sizes, at toy size."""

from collections.abc import Callable

import pytest

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.topk_sizes import EXPERIMENT
from experiments.papers.section import Section


@pytest.mark.slow
def test_losses_are_compared_at_fractions_of_the_training_set(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    (table,) = section.tables
    full, least = table.rows
    assert (full[0], least[0]) == ("100%", "5%")
    assert int(least[1]) == round(0.05 * int(full[1]))
    assert least[-2:] == ["58.31", "60.44"]  # as published
    assert [claim.statement for claim in section.claims] == [
        "smooth_topk beats ce with 5% of the training images (top-5)",
        "the advantage of smooth_topk over ce is larger with 5% than with 100% of the images "
        "(top-5)",
    ]
    assert "The paper uses ResNet-18 on ImageNet" in section.setup
