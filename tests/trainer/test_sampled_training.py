"""Training with class sampling and mixtures: resuming on other ranks, and what may not change."""

import shutil
from pathlib import Path

import pytest

from data.shards.writing.writer import write_shards
from data.sources import Glyphs
from launch.commands.evaluate import evaluate
from launch.plan.plan import manifest_of_shards
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.runs import samples_by_step
from tests.trainer.training import train_on_ranks
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.train import train


def sorted_ids(run: Path) -> dict[int, list[int]]:
    """Return the sorted sample IDs of each step. The files of the ranks are read in any order."""
    return {step: sorted(ids) for step, ids in samples_by_step(run).items()}


@pytest.fixture
def more_glyphs(tmp_path: Path) -> Path:
    """Write shards of 15 characters, two more than `glyphs`."""
    write_shards(Glyphs(15, samples=1, size=16), tmp_path / "more", workers=0)
    return tmp_path / "more"


def mixed_recipe(glyphs: Path, more: Path, run: Path, *, steps: int, weight: float = 2) -> Recipe:
    sets = [{"shards": str(glyphs)}, {"shards": str(more), "weight": weight}]
    return glyph_recipe(
        glyphs,
        run,
        data__sampling={"power": 0.5},
        data__mixture=sets,
        train__duration={"steps": steps},
        telemetry={"log_every": 1, "sample_ids": True},
        schedule={"kind": "step", "milestones": []},
    )


def test_a_mixture_is_trained_resumed_on_other_ranks_evaluated_exported_and_planned(
    glyphs: Path, more_glyphs: Path, tmp_path: Path
) -> None:
    run_on_ranks(2, train_on_ranks, [mixed_recipe(glyphs, more_glyphs, tmp_path / "run", steps=3)])
    recipe = mixed_recipe(glyphs, more_glyphs, tmp_path / "run", steps=6)
    train(recipe, rank_world())
    train(mixed_recipe(glyphs, more_glyphs, tmp_path / "whole", steps=6), rank_world())
    assert sorted_ids(tmp_path / "run") == sorted_ids(tmp_path / "whole")
    measured = load_evaluation(recipe.run / "evaluations", step=6).metrics
    evaluate(recipe.run)
    assert load_evaluation(recipe.run / "evaluations", step=6).metrics == measured
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    assert len(Bundle.open(tmp_path / "bundle").classes) == 15
    manifest = manifest_of_shards(recipe.data)
    assert manifest is not None
    assert len(manifest.classes) == 15


def test_a_run_cannot_resume_with_a_different_mixture(
    glyphs: Path, more_glyphs: Path, tmp_path: Path
) -> None:
    train(mixed_recipe(glyphs, more_glyphs, tmp_path / "run", steps=1), rank_world())
    with pytest.raises(ValueError, match=r"values of data\.mixture: "):
        train(mixed_recipe(glyphs, more_glyphs, tmp_path / "run", steps=2, weight=3), rank_world())
    shutil.rmtree(more_glyphs)
    write_shards(Glyphs(15, samples=2, size=16), more_glyphs, workers=0)
    with pytest.raises(ValueError, match=rf"different shards \({more_glyphs} train\)"):
        train(mixed_recipe(glyphs, more_glyphs, tmp_path / "run", steps=2), rank_world())
