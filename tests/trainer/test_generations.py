"""A run keeps the generation of its shards on which it started; a new run uses the newest one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from data.shards.manifest import Manifest
from data.shards.writing.append import append_shards
from data.shards.writing.writer import write_shards
from data.sources import Glyphs
from launch.commands.evaluate import evaluate
from launch.plan.classes import num_samples, shards_of
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.runs import final_tensors, losses
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.bundle.spec import CARD
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.run.folder import RunFolder
from trainer.run.trained_run import open_trained
from trainer.run.training_data import load_run_manifest
from trainer.train import train


class PlainGlyphs(Glyphs):
    """Characters without label vectors, which depend on the class list."""

    def label_vectors(self) -> None:  # type: ignore[override]
        return None


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards of 13 characters."""
    folder = tmp_path_factory.mktemp("original") / "shards"
    write_shards(PlainGlyphs(13, samples=1, size=16), folder, workers=0)
    return folder


@pytest.fixture
def shards(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "shards")


def extend(shards: Path, characters: int) -> Manifest:
    """Append samples of `characters` characters, the first 13 of which are in `shards`."""
    return append_shards(PlainGlyphs(characters, samples=1, size=16), shards, workers=0).manifest


def recipe_for(shards: Path, run: Path, steps: int, **changes: Any) -> Recipe:
    settings = {
        "train__duration": {"steps": steps},
        "telemetry": {"log_every": 1},
        "schedule": {"kind": "step", "milestones": []},
    }
    return glyph_recipe(shards, run, **{**settings, **changes})


def test_a_run_resumed_after_several_appends_is_bit_identical(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"head__weights": {"kind": "vtree", "tree": {"kind": "hierarchy"}}}
    train(recipe_for(shards, tmp_path / "whole", 6, **changes), rank_world())
    train(recipe_for(shards, tmp_path / "run", 2, **changes), rank_world())
    extend(shards, 15)
    train(recipe_for(shards, tmp_path / "run", 4, **changes), rank_world())
    extend(shards, 16)
    capsys.readouterr()
    train(recipe_for(shards, tmp_path / "run", 6, **changes), rank_world())
    assert f"{shards}: this run uses generation 1 of 3; " in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    whole, run = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "run")
    assert whole.keys() == run.keys()
    assert all(whole[name].equal(run[name]) for name in whole)
    step = {"step": 6}
    measured = load_evaluation(tmp_path / "run" / "evaluations", **step).metrics
    assert measured == load_evaluation(tmp_path / "whole" / "evaluations", **step).metrics


def test_a_run_is_evaluated_and_exported_with_its_generation(shards: Path, tmp_path: Path) -> None:
    recipe = recipe_for(shards, tmp_path / "run", 2)
    train(recipe, rank_world())
    measured = load_evaluation(recipe.run / "evaluations", step=2)
    extend(shards, 15)
    evaluate(recipe.run)
    again = load_evaluation(recipe.run / "evaluations", step=2)
    assert (again.metrics, again.num_samples) == (measured.metrics, measured.num_samples)
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    assert len(Bundle.open(tmp_path / "bundle").classes) == 13


def test_a_new_run_uses_the_newest_generation_or_that_of_the_recipe(
    shards: Path, tmp_path: Path
) -> None:
    first, second = Manifest.load(shards), extend(shards, 15)
    for generation, manifest in ((None, second), (1, first), (2, second)):
        recipe = recipe_for(shards, tmp_path / str(generation), 1, data__generation=generation)
        train(recipe, rank_world())
        stored = RunFolder(recipe.run).load_recipe()
        assert stored.data.generation == manifest.generation
        head = open_trained(recipe.run, rank_world()).task.head
        assert head.num_classes == len(manifest.classes)
        training = sum(shard.samples for shard in manifest.of_split("train"))
        assert num_samples(recipe, shards_of(recipe), None) == training


def test_a_run_resumes_while_shards_of_a_later_generation_are_missing(
    shards: Path, tmp_path: Path
) -> None:
    """A copy of an appended set may contain the manifest before it contains all shards."""
    train(recipe_for(shards, tmp_path / "run", 1), rank_world())
    (shards / extend(shards, 15).shards[-1].file).unlink()
    train(recipe_for(shards, tmp_path / "run", 2), rank_world())
    with pytest.raises(FileNotFoundError, match="is missing: copy it"):
        train(recipe_for(shards, tmp_path / "new", 1), rank_world())


def test_a_bundle_names_the_sources_of_all_generations(shards: Path, tmp_path: Path) -> None:
    first, second = Manifest.load(shards), extend(shards, 15)
    recipe = recipe_for(shards, tmp_path / "run", 1)
    train(recipe, rank_world())
    export_run(recipe.run, tmp_path / "bundle", rank_world())
    data = f"| data | {first.source}, {second.source} |"
    assert data in (tmp_path / "bundle" / CARD).read_text()


def test_a_generation_that_does_not_exist_is_rejected(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{shards}: generation 2 does not exist"):
        train(recipe_for(shards, tmp_path / "run", 1, data__generation=2), rank_world())


def test_a_mixture_keeps_the_generation_of_each_set(shards: Path, tmp_path: Path) -> None:
    other = shutil.copytree(shards, tmp_path / "other")
    sets = [{"shards": str(shards)}, {"shards": str(other)}]
    changes = {"data__mixture": sets, "data__sampling": {"power": 0.5}}
    train(recipe_for(shards, tmp_path / "whole", 4, **changes), rank_world())
    train(recipe_for(shards, tmp_path / "run", 2, **changes), rank_world())
    extend(other, 15)
    train(recipe_for(shards, tmp_path / "run", 4, **changes), rank_world())
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    train(recipe_for(shards, tmp_path / "new", 1, **changes), rank_world())
    assert RunFolder(tmp_path / "new").load_recipe().data.generations == [1, 1, 2]


def generations_of_ranks(folders: list[str], run: Path) -> tuple[list[int | None], int]:
    """Return the generations and the number of classes that this rank uses."""
    world = rank_world()
    recipe = recipe_for(Path(folders[world.rank]), run, 1)
    recipe, manifest = load_run_manifest(recipe, RunFolder(run), world)
    return recipe.data.generations, len(manifest.classes)


def test_ranks_that_find_different_generations_use_the_older_one(
    shards: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(shards, tmp_path / "older")
    extend(shards, 15)
    found = run_on_ranks(2, generations_of_ranks, [str(shards), str(older)], tmp_path / "run")
    assert found == [([1], 13), ([1], 13)]
