"""Paper 001 on CIFAR-100, at toy size."""

from collections.abc import Callable

import pytest
import torch

from experiments.papers.experiment import Experiment
from experiments.papers.experiments.quadratic_cifar import EXPERIMENT, loss_of_zero, scenes
from experiments.papers.section import Section
from heads.losses.base import Block, Loss, Rows
from heads.losses.registry import LOSSES


@pytest.mark.slow
def test_three_losses_are_compared_on_three_sets_of_classes(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    best, shared = section.tables
    assert len(best.rows) == len(shared.rows) == 9
    assert {row[0] for row in best.rows} == {
        "25 random classes",
        "25 mammals",
        "all 100 classes",
    }
    assert "(below 20)" in best.rows[-2][3]  # quoted from the paper, for quadratic on all classes
    assert len(section.claims) == 6
    assert len(section.plots) == 2


def test_scenes_select_the_five_mammal_superclasses_and_random_classes() -> None:
    coarse = [f"coarse {i // 5}" for i in range(90)] + ["small_mammals"] * 5 + ["fish"] * 5
    names = [f"fine {i}" for i in range(100)]
    found = scenes(names, coarse)
    assert found["mammals"] == tuple(names[90:95])
    assert found["random"] is not None
    assert len(set(found["random"])) == 25
    assert set(found["random"]) <= set(names)
    assert found["all"] is None


@pytest.mark.parametrize("kind", ["ce", "quadratic", "ccql"])
@pytest.mark.parametrize("num_classes", [25, 100])
def test_curves_start_at_the_loss_of_zero_logits(kind: str, num_classes: int) -> None:
    loss: Loss = LOSSES[kind]()
    labels = torch.tensor([3, 0])
    logits = torch.zeros(2, num_classes, dtype=torch.float64)
    block = Block.of(torch.arange(num_classes), labels, labels, logits)
    found = loss.value(loss.merge([loss.statistics(logits, block)]), Rows(num_classes, labels))
    assert loss_of_zero(kind, num_classes) == pytest.approx(float(found))
