"""A run folder contains one run, and only settings that do not affect earlier steps may change."""

from pathlib import Path
from typing import Any

import pytest

from tests.shards import glyph_recipe
from trainer.config import Recipe
from trainer.recipe import load_recipe
from trainer.run.folder import RunFolder
from trainer.run.state import changes_since, provenance


def a_recipe(folder: Path, **changes) -> Recipe:
    return glyph_recipe(Path("shards"), folder, **changes)


def test_the_folder_contains_only_the_resolved_recipe(tmp_path):
    recipe = a_recipe(tmp_path / "a" / "run", seed=3)
    run = RunFolder(tmp_path / "a" / "run")
    run.write(recipe)
    assert [path.name for path in run.path.iterdir()] == ["recipe.yaml"]
    assert load_recipe(run.recipe) == run.load_recipe() == recipe
    text = run.recipe.read_text()
    # Default values are stored too, so new defaults in a later version do not affect this run.
    assert "init_std: 0.01" in text
    assert "kind: cosine" in text


def stored(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return what a checkpoint of a run with these settings stores."""
    return provenance(a_recipe(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        ({"seed": 1}, ["seed"]),
        ({"data__shards": "elsewhere"}, ["data.shards"]),
        (
            {"data__augment__mix": {"mixup_alpha": 1}},
            ["data.augment.mix.mixup_alpha"],
        ),
        ({"head__loss__kind": "bce"}, ["head.loss.kind"]),
        ({"head__bias": False, "seed": 1}, ["head.bias", "seed"]),
        ({"optimizer": {"kind": "adamw"}}, ["optimizer.kind"]),
        ({"train__global_batch": 24}, ["train.global_batch"]),
        ({"optimizer__lr": 0.5}, []),
        ({"schedule": {"kind": "step", "milestones": [{"steps": 2}]}}, []),
        ({"train__duration": {"epochs": 9}}, []),
        ({"train__micro_batches": 2}, []),
        ({"checkpoint": {"every": {"steps": 1}, "keep_last": 5}}, []),
        ({"data__workers": 2}, []),
        ({"data__eval_split": "other"}, []),
        ({"head__memory_mib": 1}, []),
    ],
)
def test_only_settings_that_do_not_affect_earlier_steps_may_change(changes, fixed, tmp_path):
    found = changes_since(stored(tmp_path), stored(tmp_path, **changes))
    assert found
    keys = {change.key for change in found if change.is_fixed}
    assert keys >= {*fixed}
    assert bool(keys) == bool(fixed)


def test_settings_that_only_another_version_of_kway_knows_have_not_changed(tmp_path):
    """Earlier versions of kway could append samples to shards."""
    before = stored(tmp_path)
    before["recipe"]["data"]["generation"] = 1
    del before["recipe"]["head"]["init_std"]
    (change,) = changes_since(before, stored(tmp_path))
    assert (change.key, change.old, change.is_fixed) == ("head.init_std", "not set", False)


def test_a_stored_recipe_may_contain_the_generation_of_its_shards(tmp_path):
    run = RunFolder(tmp_path)
    run.write(a_recipe(tmp_path))
    text = run.recipe.read_text()
    run.recipe.write_text(text.replace("data:\n", "data:\n  generation: 1\n"))
    assert run.recipe.read_text() != text
    assert run.load_recipe() == a_recipe(tmp_path)


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_the_error_for_a_folder_that_cannot_be_created_names_the_key(path, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = rf"^run is {tmp_path / path}, which cannot be created or written to \(.+\): choose"
    with pytest.raises(OSError, match=message), RunFolder(tmp_path / path).locked():
        pass
    assert (tmp_path / "file").read_text() == "mine"
