"""Paper 003 with label noise at toy size, and the choice of a run's best checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.papers.budget import Budget
from experiments.papers.comparison import Rates, Run
from experiments.papers.experiment import Experiment
from experiments.papers.experiments.cifar import densenet
from experiments.papers.experiments.label_noise import EXPERIMENT
from experiments.papers.job_runner import JobRunner
from experiments.papers.section import Section
from experiments.papers.training import training


@pytest.mark.slow
def test_both_losses_are_tested_at_each_noise_level(
    conducted: Callable[[Experiment], Section],
) -> None:
    section = conducted(EXPERIMENT)
    best, shared = section.tables
    assert [row[0] for row in best.rows] == [row[0] for row in shared.rows] == ["0", "1"]
    clean, noisy = best.rows
    assert clean[1].endswith("(94.34)")
    assert noisy[3].endswith("(72.93)")
    assert "(" not in noisy[2]  # the paper does not report the last checkpoint of cross entropy
    assert [claim.statement for claim in section.claims] == [
        "without noise, ce beats smooth_topk (top-1)",
        "at label noise 1, smooth_topk beats ce (top-5)",
        "at label noise 1, smooth_topk beats ce (top-1)",
    ]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_and_the_last_checkpoint_are_tested(
    mode: str, papers_data: Path, tmp_path: Path
) -> None:
    network = densenet(Budget(0, 1), 12, train=256)
    recipe: dict[str, Any] = network.recipe(
        Run("ce", Rates(0.1, 0.0), 6, seed=1, split="test"), loss={"kind": "ce"}
    )
    recipe["evaluation"]["every"] = {"steps": 1}
    recipe["checkpoint"]["keep_best"] = {"measure": "top1", "mode": mode}
    job = training(network.of(), recipe, also=("test", "train"))
    with JobRunner(papers_data, tmp_path, workers=0) as runner:
        runner.measure([network.of().job])
        found = runner.measure([job])[job]
    best, last = found["best"]["test"]["top1"], found["test"]["top1"]
    assert last == found["top1"]
    assert best < last if mode == "min" else best >= last
    assert found["best"]["test"]["step"] == found["best"]["step"]
    assert found["best"]["train"]["step"] == found["best"]["step"]
