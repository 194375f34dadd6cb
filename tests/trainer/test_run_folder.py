"""A run folder contains one run, and only settings that do not affect earlier steps may change."""

from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.recipe import load_recipe
from trainer.run.folder import RunFolder


def a_recipe(folder: Path, **changes) -> Recipe:
    return glyph_recipe(Path("shards"), folder, **changes)


def claim(run: RunFolder, recipe: Recipe) -> None:
    """Check and store the recipe, as a run does when it starts."""
    run.check(recipe)
    run.write(recipe)


def started(folder: Path, **changes) -> RunFolder:
    """Return a run folder whose run has a checkpoint."""
    run = RunFolder(folder)
    claim(run, a_recipe(folder, **changes))
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    return run


def test_the_folder_contains_only_the_resolved_recipe(tmp_path):
    recipe = a_recipe(tmp_path / "a" / "run", seed=3)
    run = RunFolder(tmp_path / "a" / "run")
    claim(run, recipe)
    assert [path.name for path in run.path.iterdir()] == ["recipe.yaml"]
    assert load_recipe(run.recipe) == run.load_recipe() == recipe
    text = run.recipe.read_text()
    # Default values are stored too, so new defaults in a later version do not affect this run.
    assert "init_std: 0.01" in text
    assert "kind: cosine" in text


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"seed": 1}, "seed"),
        ({"data__shards": "elsewhere"}, "data.shards"),
        ({"head__loss__kind": "bce"}, "head.loss.kind"),
        ({"head__weights__kind": "vtree"}, "head.weights.kind, head.weights.tree.kind"),
        ({"head__bias": False, "seed": 1}, "head.bias, seed"),
        ({"optimizer": {"kind": "adamw"}}, "optimizer.kind"),
        ({"train__global_batch": 24}, "train.global_batch"),
    ],
)
def test_settings_that_affect_earlier_steps_may_not_change(changes, keys, tmp_path):
    run = started(tmp_path)
    before = run.recipe.read_bytes()
    with pytest.raises(
        ValueError, match=f"was started with different values of {keys}: "
    ) as caught:
        claim(run, a_recipe(tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert run.recipe.read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__lr": 0.5},
        {"schedule": {"kind": "step", "milestones": [{"steps": 2}]}},
        {"train__duration": {"epochs": 9}},
        {"train__micro_batches": 2},
        {"checkpoint": {"every": {"steps": 1}, "keep_last": 5}},
        {"data__workers": 2},
        {"data__eval_split": "other"},
        {"head__memory_mib": 1},
    ],
)
def test_other_settings_may_change_and_are_stored(changes, tmp_path):
    run = started(tmp_path)
    recipe = a_recipe(tmp_path, **changes)
    assert recipe != run.load_recipe()
    claim(run, recipe)
    assert run.load_recipe() == recipe


@pytest.mark.parametrize("left", [None, "step-00000001.partial"])
def test_any_setting_may_change_without_a_committed_checkpoint(left, tmp_path):
    """A save that is killed leaves a `.partial` folder, which is not a checkpoint."""
    run = RunFolder(tmp_path)
    claim(run, a_recipe(tmp_path))
    if left is not None:
        (run.checkpoints / left).mkdir(parents=True)
    recipe = a_recipe(tmp_path, seed=1, resume="never")
    claim(run, recipe)
    assert run.load_recipe() == recipe


def test_a_stored_recipe_may_contain_the_generation_of_its_shards(tmp_path):
    """Earlier versions of kway could append samples to shards."""
    run = started(tmp_path)
    stored = run.recipe.read_text()
    run.recipe.write_text(stored.replace("data:\n", "data:\n  generation: 1\n"))
    assert run.recipe.read_text() != stored
    assert run.load_recipe() == a_recipe(tmp_path)


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_the_error_for_a_folder_that_cannot_be_created_names_the_key(path, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = rf"^run is {tmp_path / path}, which cannot be created or written to \(.+\): choose"
    with pytest.raises(OSError, match=message), RunFolder(tmp_path / path).locked():
        pass
    assert (tmp_path / "file").read_text() == "mine"
