"""The RECIPE argument: shipped recipes are found by name, and missing inputs are reported early."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch.recipe_inputs import local_inputs
from launch.shipped import RECIPES, find_recipe, shipped_recipes
from tests.shards import glyph_recipe
from trainer.recipe import dump_recipe, load_recipe

Kway = Callable[..., int]


@pytest.mark.parametrize("name", ["glyphs", "glyphs.yaml"])
def test_a_shipped_recipe_is_found_by_name_in_any_folder(
    name: str, kway: Kway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glyphs").mkdir()  # a folder is not a recipe
    assert kway("train", name, "seed=7", "--print-config") == 0
    recipe = load_recipe(RECIPES / "glyphs.yaml", ["seed=7"])
    assert capsys.readouterr().out == dump_recipe(recipe)


def test_an_existing_file_takes_precedence_over_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("glyphs.yaml").touch()
    assert find_recipe("glyphs.yaml") == Path("glyphs.yaml")
    assert find_recipe("glyphs") == RECIPES / "glyphs.yaml"


@pytest.mark.parametrize("command", ["train", "plan", "doctor", "k8s render training"])
def test_an_unknown_name_is_an_error_that_lists_the_recipes(
    command: str, error_of: Callable[..., str]
) -> None:
    error = error_of(*command.split(), "glyhps")
    assert "did you mean glyphs?" in error
    assert all(name in error for name in shipped_recipes())


# ---------------------------------------------------------------- missing inputs


def test_training_without_shards_fails_before_ranks_start(
    error_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of("train", "emoji-names", "--nproc", 8)  # of this process, not of ranks
    assert "kway shard emoji-names -o shards/emoji-names" in error
    assert "kway tokenizer shards/emoji-names -o tokenizers/emoji-names" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_states_the_commands_that_create_its_inputs(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    for _, command in local_inputs(load_recipe(path), path):
        assert "SOURCE" not in command
        assert command in path.read_text(encoding="utf-8")


def test_a_command_in_a_comment_cannot_run_another_program(glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(glyphs, tmp_path / "run", data__shards="shards/mine")
    file = tmp_path / "recipe.yaml"
    for rest in ("; rm x", "| sh", "$(rm x)", "`rm x`", "&& rm x", "> x"):
        file.write_text(f"#   kway shard glyphs -o shards/mine {rest}\n")
        ((_, command),) = local_inputs(recipe, file)
        assert command == "kway shard SOURCE -o shards/mine"


def test_a_name_that_is_too_long_for_a_file_lists_the_shipped_recipes(
    error_of: Callable[..., str],
) -> None:
    assert "glyphs" in error_of("train", "a" * 300)
