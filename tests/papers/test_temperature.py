"""Paper 003 by temperature, at toy size, and the share of nonzero derivatives."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.papers.experiment import Experiment
from benchmarks.papers.experiments.temperature import EXPERIMENT, nonzero_share
from benchmarks.papers.section import Section

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
def test_the_hinge_has_two_nonzero_derivatives_and_a_warm_loss_has_all(
    tau: str, share: float
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, _CLASSES)
    assert nonzero_share(logits, torch.arange(20), tau) == pytest.approx(share)


def test_a_cold_loss_has_few_nonzero_derivatives_if_scores_differ() -> None:
    torch.manual_seed(0)
    logits = 10 * torch.randn(20, _CLASSES)
    assert nonzero_share(logits, torch.arange(20), "1e-3") < 0.2
