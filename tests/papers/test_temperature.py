"""Paper 003 at several temperatures and toy size, and the fraction of nonzero derivatives."""

from collections.abc import Callable

import pytest
import torch

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.temperature import EXPERIMENT, nonzero_share
from experiments.papers.section import Section

_CLASSES = 50


@pytest.mark.slow
def test_temperatures_are_compared_and_their_derivatives_counted(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    (table,) = section.tables
    assert [row[0] for row in table.rows] == ["0", "1e-3", "1", "100"]
    assert table.rows[0][1].endswith("(10.01)")
    assert table.rows[0][-1].startswith("2.0")  # two of a hundred
    assert section.claims[-1].verdict == "holds"
    assert len(section.claims) == 5


@pytest.mark.parametrize(("tau", "share"), [("0", 2 / _CLASSES), ("1", 1.0), ("100", 1.0)])
def test_only_two_derivatives_are_nonzero_at_temperature_0_and_all_at_1(
    tau: str, share: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, _CLASSES)
    assert nonzero_share(logits, torch.arange(20), tau) == pytest.approx(share)


def test_few_derivatives_are_nonzero_at_a_low_temperature_if_scores_differ() -> None:
    torch.manual_seed(0)
    logits = 10 * torch.randn(20, _CLASSES)
    assert nonzero_share(logits, torch.arange(20), "1e-3") < 0.2
