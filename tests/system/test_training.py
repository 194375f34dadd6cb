"""Complete training runs. All launchers give the same results, and input errors take one line."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from data.shards.writing.writer import write_shards
from data.sources import Glyphs
from tests.shards import glyph_recipe
from tests.system.processes import run, write_recipe
from tests.system.runs import final_tensors, losses
from trainer.__main__ import main


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_torchrun_and_the_installed_command_give_the_same_losses(ranks, glyphs, tmp_path):
    """The working directory contains folders named after kway's packages, which must not shadow
    them.
    """
    recipe = glyph_recipe(glyphs, tmp_path / "a", telemetry__log_every=1)
    path = write_recipe(tmp_path, recipe)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    by_torchrun = run([*torchrun, "--nproc-per-node", ranks, "-m", "trainer", str(path)])
    for name in ("data", "trainer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not the package')")
    command = [str(Path(sys.executable).with_name("kway")), "train", str(path)]
    by_kway = run([*command, f"run={tmp_path / 'b'}", "--nproc", ranks], cwd=tmp_path)
    assert (by_torchrun.returncode, by_kway.returncode) == (0, 0), by_kway.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.shards=/nowhere"], "/nowhere"),
        (
            ["data.eval_split=other"],
            "data.eval_split is 'other', but the shards contain the splits train, test",
        ),
        (["backbone.config.num_channels=3"], "num_channels is 3, but data.image.channels is 1"),
    ],
)
def test_an_input_error_prints_one_line_and_exits_with_2(
    overrides, message, glyphs, tmp_path, capsys
):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    assert main([str(recipe), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture(scope="module")
def finished(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The recipe of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = str(write_recipe(folder, glyph_recipe(glyphs, folder / "run")))
    assert main([recipe]) == 0
    return recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["head.loss.kind=bce", "seed=3"],
            "was started with different values of head.loss.kind, seed",
        ),
        (["resume=never"], "contains checkpoints, but resume=never is set"),
        (["train.duration.steps=2"], "is at step 4, but train.duration is 2 steps"),
    ],
)
def test_a_recipe_that_cannot_continue_a_run_is_rejected(overrides, message, finished, capsys):
    assert main([finished, *overrides]) == 2
    assert message in capsys.readouterr().err


def test_starting_a_finished_run_again_does_not_change_it(finished):
    run = Path(finished).parent / "run"
    before = final_tensors(run)
    assert main([finished]) == 0
    after = final_tensors(run)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_different_shards_at_the_same_path_are_rejected(glyphs, tmp_path, capsys):
    shards = tmp_path / "shards"
    shutil.copytree(glyphs, shards)
    recipe = str(write_recipe(tmp_path, glyph_recipe(shards, tmp_path / "run")))
    assert main([recipe]) == 0
    shutil.rmtree(shards)
    write_shards(Glyphs(13, samples=2, size=16), shards, workers=0)
    assert main([recipe, "train.duration.steps=6"]) == 2
    assert "was trained on different shards" in capsys.readouterr().err
