"""A dry run: what it reports, which errors it finds, and that it changes no file."""

import shutil
import socket
from pathlib import Path

import pytest

from tests.shards import glyph_recipe, text_recipe
from tests.system.processes import write_recipe
from trainer.__main__ import main
from trainer.checkpoints import committed_folders
from trainer.run.folder import RunFolder


def files(folder: Path) -> dict[Path, tuple[int, bytes] | None]:
    """Every path below a folder; for a file its content and modification time."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes()) if path.is_file() else None
        for path in folder.rglob("*")
    }


def dry_run(recipe: Path, *overrides: str) -> int:
    """The exit code of a dry run, which changes nothing in the folder of its recipe."""
    before = files(recipe.parent)
    code = main([str(recipe), "--dry-run", *overrides])
    assert files(recipe.parent) == before
    return code


def test_two_ranks_report_one_line_and_leave_nothing_behind(kway, glyphs, tmp_path, capfd):
    run = tmp_path / "runs" / "a"
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, run))
    before = files(tmp_path)
    assert kway("train", recipe, "--nproc", 2, "--dry-run") == 0
    shown, errors = capfd.readouterr()
    assert errors == ""
    assert shown.startswith(f"dry run passed: {run}: 269 samples, 13 classes; ")
    assert shown.endswith("; 2 x cpu ddp; 4 steps of 12\n")
    assert shown.count("\n") == 1
    assert files(tmp_path) == before


def test_a_run_is_resumed_and_none_of_its_files_is_changed(glyphs, tmp_path, capsys):
    run = tmp_path / "run"
    changes = {"checkpoint__every": {"steps": 2}, "telemetry__sample_ids": True}
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, run, **changes))
    assert main([str(recipe)]) == 0
    # The state after a kill during step 4: a real start would trim its logs to step 2.
    shutil.rmtree(committed_folders(run / "checkpoints")[-1])
    capsys.readouterr()
    assert dry_run(recipe, "optimizer.lr=0.1") == 0
    changed, passed = capsys.readouterr().out.splitlines()
    assert changed == "changed on resume: optimizer.lr: 0.05 -> 0.1"
    assert passed.endswith(", from step 2")


def test_a_damaged_checkpoint_is_named(glyphs, tmp_path, capsys):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    assert main([str(recipe)]) == 0
    (newest,) = committed_folders(tmp_path / "run" / "checkpoints")
    next(newest.glob("*.safetensors")).unlink()
    capsys.readouterr()
    assert dry_run(recipe) == 0
    refused, passed = capsys.readouterr().out.splitlines()
    assert refused.startswith(f"refused checkpoint {newest}")
    assert "from step" not in passed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.shards=/nowhere"], "/nowhere"),
        (["data.eval_split=other"], "data.eval_split is 'other'"),
        (["head.num_classes=7"], "head.num_classes is 7 and the shards have 13 classes"),
        (["run=/dev/null/run"], "run is /dev/null/run, which cannot be created or written"),
        (["run=/proc/run"], "run is /proc/run, which cannot be created or written"),
    ],
)
def test_an_error_of_a_start_is_one_line_and_its_exit_code(
    overrides, message, glyphs, tmp_path, capsys
):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    assert dry_run(recipe, *overrides) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_tokenizer_that_does_not_fit_is_found(texts, tmp_path, capsys):
    recipe = write_recipe(tmp_path, text_recipe(texts, tmp_path / "run"))
    assert dry_run(recipe) == 0
    assert dry_run(recipe, "backbone.config.vocab_size=20") == 2
    assert "and the backbone embeddings for 20" in capsys.readouterr().err


def test_samples_of_the_first_batch_that_cannot_be_read_are_found(glyphs, tmp_path, capsys):
    shutil.copytree(glyphs, tmp_path / "shards")
    (tar,) = (tmp_path / "shards").glob("train-*.tar")
    content = bytearray(tar.read_bytes())
    # All but the first and the last sample, which opening the shards looks at.
    for place in range(4096, len(content) - 16384, 512):
        content[place] ^= 1
    tar.write_bytes(content)
    recipe = write_recipe(tmp_path, glyph_recipe(tmp_path / "shards", tmp_path / "run"))
    assert dry_run(recipe, "data.max_bad_samples=1") == 2
    assert "kway shard verify" in capsys.readouterr().err


def test_a_folder_in_which_a_run_is_being_trained_is_an_error(glyphs, tmp_path, capsys):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    with RunFolder(tmp_path / "run").locked():
        assert dry_run(recipe) == 2
    assert "is being trained by another process" in capsys.readouterr().err
    assert dry_run(recipe) == 0


def test_a_port_in_use_is_an_error(glyphs, tmp_path, capsys):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert dry_run(recipe, f"telemetry.port={port}") == 2
    assert f"telemetry.port {port} on 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert dry_run(recipe, f"telemetry.port={port}") == 0
