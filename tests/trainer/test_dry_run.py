"""A dry run prints a report, detects errors and changes no files."""

import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from trainer.__main__ import main
from trainer.checkpoints import committed_folders
from trainer.recipe import load_recipe
from trainer.train import train


def files(folder: Path) -> dict[Path, tuple[int, bytes] | None]:
    """Return every path in a folder, with the modification time and content of each file."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else None
        for path in folder.rglob("*")
    }


def dry_run(recipe: Path, *overrides: str) -> int:
    """Start a dry run, check that no file in the folder of its recipe changes, and return its exit
    code.
    """
    before = files(recipe.parent)
    code = main([str(recipe), "--dry-run", *overrides])
    assert files(recipe.parent) == before
    return code


def output_of_a_dry_run(recipe: Path) -> str:
    with redirect_stdout(StringIO()) as output, redirect_stderr(output):
        train(load_recipe(recipe), rank_world(), dry_run=True)
    return output.getvalue()


def check_output(shown: str, run: Path) -> None:
    assert shown.startswith(f"dry run passed: {run}: 269 samples, 13 classes; ")
    assert shown.endswith("; 2 x cpu ddp; 4 steps of 12\n")
    assert shown.count("\n") == 1


def test_two_ranks_print_one_line_and_leave_no_files(glyphs, tmp_path):
    run = tmp_path / "runs" / "a"
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, run))
    before = files(tmp_path)
    shown, of_rank_1 = run_on_ranks(2, output_of_a_dry_run, recipe)
    check_output(shown, run)
    assert of_rank_1 == ""
    assert files(tmp_path) == before


def test_a_dry_run_of_an_existing_run_resumes_it_without_changing_files(glyphs, tmp_path, capsys):
    run = tmp_path / "run"
    changes = {"checkpoint__every": {"steps": 2}, "telemetry__sample_ids": True}
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, run, **changes))
    assert main([str(recipe)]) == 0
    # This is the state after a kill during step 4. A real start would truncate the logs to step 2.
    shutil.rmtree(committed_folders(run / "checkpoints")[-1])
    capsys.readouterr()
    assert dry_run(recipe, "optimizer.lr=0.1") == 0
    changed, rate, passed = capsys.readouterr().out.splitlines()
    assert changed == "changed on resume: optimizer.lr: 0.05 -> 0.1"
    assert rate.startswith("changed on resume: learning_rate: ")
    assert passed.endswith(", from step 2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.shards=/nowhere"], "/nowhere"),
        (["run=/dev/null/run"], "run is /dev/null/run, which cannot be created or written"),
        (["run=/proc/run"], "run is /proc/run, which cannot be created or written"),
    ],
)
def test_an_error_at_the_start_prints_one_line_and_exits_with_2(
    overrides, message, glyphs, tmp_path, capsys
):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    assert dry_run(recipe, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_unreadable_samples_in_the_first_batch_are_detected(glyphs, tmp_path, capsys):
    shutil.copytree(glyphs, tmp_path / "shards")
    (tar,) = (tmp_path / "shards").glob("train-*.tar")
    content = bytearray(tar.read_bytes())
    # Damage all samples except the first and the last, which are read when the shards are opened.
    for offset in range(4096, len(content) - 16384, 512):
        content[offset] ^= 1
    tar.write_bytes(content)
    recipe = write_recipe(tmp_path, glyph_recipe(tmp_path / "shards", tmp_path / "run"))
    assert dry_run(recipe, "data.max_bad_samples=1") == 2
    assert "kway shard verify" in capsys.readouterr().err
