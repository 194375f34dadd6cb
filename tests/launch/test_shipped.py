"""The RECIPE argument: shipped recipes are found by name, and missing inputs are reported early."""

import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from data.messages import kway_command
from launch.main import app
from launch.recipe_inputs import local_inputs
from launch.shipped import RECIPES, find_recipe, shipped_recipes
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from trainer.recipe import dump_recipe, load_recipe

Kway = Callable[..., int]


def every_command(group: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of a group and of all commands below it."""
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from every_command(command, *words, name)


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
    command: str, kway: Kway, capsys
) -> None:
    assert kway(*command.split(), "glyhps") == 2
    error = capsys.readouterr().err
    assert "did you mean glyphs?" in error
    assert all(name in error for name in shipped_recipes())
    assert error.count("\n") == 1


def test_kway_train_without_arguments_lists_the_shipped_recipes(kway: Kway, capsys) -> None:
    assert kway("train") == 2
    shown = capsys.readouterr().out
    assert "kway train [OPTIONS]" in shown
    for name, description in shipped_recipes().items():
        assert f"{name} " in shown
        assert description[:60] in shown


def test_h_is_short_for_help_in_every_command(kway: Kway, capsys) -> None:
    for words in every_command(get_command(app)):
        assert kway(*words, "-h") == 0, words
        assert "Usage: " in capsys.readouterr().out


# ---------------------------------------------------------------- missing inputs


def test_training_without_shards_fails_before_ranks_start(
    kway: Kway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ((), ("--dry-run",)):
        assert kway("train", "emoji-names", "--nproc", 8, *options) == 2
        error = capsys.readouterr().err  # of this process, not of ranks
        assert error.count("\n") == 1
        assert "kway shard emoji-names -o shards/emoji-names" in error
        assert "kway tokenizer shards/emoji-names -o tokenizers/emoji-names" in error
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_missing_shards(
    kway: Kway, glyphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from launch.doctor import checks

    kept = {"inputs": checks.CHECKS["inputs"]}
    monkeypatch.setattr(checks, "CHECKS", kept)
    monkeypatch.chdir(tmp_path)
    assert kway("doctor", "glyphs") == 1
    assert "run kway shard glyphs -o shards/glyphs --classes 1000" in capsys.readouterr().out
    (tmp_path / "shards" / "glyphs").mkdir(parents=True)
    assert kway("doctor", "glyphs") == 1  # `kway shard` has not finished
    shutil.copytree(glyphs, tmp_path / "shards" / "glyphs", dirs_exist_ok=True)
    assert kway("doctor", "glyphs") == 0
    (tmp_path / "shards" / "glyphs" / "train-000000.tar").unlink()
    assert kway("doctor", "glyphs") == 1


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_states_the_commands_that_create_its_inputs(name: str) -> None:
    path = RECIPES / f"{name}.yaml"
    for needed in local_inputs(load_recipe(path), path):
        assert "SOURCE" not in needed.command
        assert needed.command in path.read_text(encoding="utf-8")


def test_the_command_for_inputs_of_another_recipe_names_the_folder(
    glyphs: Path, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    overrides = ["data.shards=my shards/a"]
    (needed,) = local_inputs(load_recipe(path, overrides), path)
    assert shlex.split(needed.command) == ["kway", "shard", "SOURCE", "-o", "my shards/a"]


def test_words_of_a_printed_command_are_quoted() -> None:
    words = ["serve", "my bundles/a'b", "--class", "$x"]
    assert shlex.split(kway_command(*words)) == ["kway", *words]


def test_a_command_in_a_comment_cannot_run_another_program(glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(glyphs, tmp_path / "run", data__shards="shards/mine")
    file = tmp_path / "recipe.yaml"
    for rest in ("; rm x", "| sh", "$(rm x)", "`rm x`", "&& rm x", "> x"):
        file.write_text(f"#   kway shard glyphs -o shards/mine {rest}\n")
        (needed,) = local_inputs(recipe, file)
        assert needed.command == "kway shard SOURCE -o shards/mine"


def test_a_name_that_is_too_long_for_a_file_lists_the_shipped_recipes(
    kway: Kway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kway("train", "a" * 300) == 2
    assert "glyphs" in capsys.readouterr().err
