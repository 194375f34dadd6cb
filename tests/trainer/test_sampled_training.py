"""Training with class sampling: resuming on other ranks, and settings that may not change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.config import SamplingConfig
from data.loading.sampling import training_counts
from data.shards.split import open_split
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.runs import losses, samples_by_step
from trainer.config import Recipe
from trainer.train import train


def train_on_a_rank(recipe: Recipe) -> None:
    train(recipe, rank_world())


def sampled_recipe(shards: Path, run: Path, *, steps: int, **changes: Any) -> Recipe:
    settings = {
        "data__sampling": {"power": 0, "epoch_samples": 50},
        "train__duration": {"steps": steps},
        "telemetry": {"log_every": 1, "sample_ids": True},
        "schedule": {"kind": "step", "milestones": []},
    }
    return glyph_recipe(shards, run, **{**settings, **changes})


def test_a_run_resumed_mid_epoch_on_another_number_of_ranks_trains_on_the_same_batches(
    glyphs: Path, tmp_path: Path
) -> None:
    run_on_ranks(2, train_on_a_rank, sampled_recipe(glyphs, tmp_path / "resumed", steps=3))
    run_on_ranks(3, train_on_a_rank, sampled_recipe(glyphs, tmp_path / "resumed", steps=6))
    train(sampled_recipe(glyphs, tmp_path / "whole", steps=6), rank_world())
    batches = samples_by_step(tmp_path / "whole")
    resumed = samples_by_step(tmp_path / "resumed")
    assert {s: sorted(ids) for s, ids in resumed.items()} == {
        s: sorted(ids) for s, ids in batches.items()
    }
    assert len(batches) == 6
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    with open_split(glyphs, "train") as split:
        labels = split.labels[np.concatenate([batches[step] for step in range(1, 5)])]
    assert len(labels) == 48
    assert np.ptp(np.bincount(labels, minlength=13)) <= 2


def test_a_run_cannot_resume_with_a_different_power(glyphs: Path, tmp_path: Path) -> None:
    train(sampled_recipe(glyphs, tmp_path / "run", steps=1), rank_world())
    changed = sampled_recipe(
        glyphs, tmp_path / "run", steps=2, data__sampling={"power": 0.5, "epoch_samples": 50}
    )
    with pytest.raises(ValueError, match=r"different values of data\.sampling\.power: "):
        train(changed, rank_world())


def test_priors_and_class_weights_use_the_counts_of_sampled_epochs(glyphs: Path) -> None:
    data = glyph_recipe(glyphs, Path("unused")).data
    with open_split(glyphs, "train") as split:
        assert np.array_equal(training_counts(split, data), split.class_counts())
        half = data.model_copy(update={"sampling": SamplingConfig(power=0.5, epoch_samples=1000)})
        roots = np.sqrt(split.class_counts())
        assert np.allclose(training_counts(split, half), 1000 * roots / roots.sum(), rtol=1e-6)
