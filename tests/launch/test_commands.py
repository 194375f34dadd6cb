"""The `kway` command as a person meets it: what it prints, its exit codes, its one-line errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest

from heads.losses import LOSSES
from launch.demo import runs
from launch.main import app, main
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, environment, write_recipe
from tests.tiny_bundle import write as write_bundle
from trainer.bundle.bundle import Bundle
from trainer.recipe import load_recipe
from trainer.run.folder import RunFolder
from trainer.train import train

Kway = Callable[..., int]
GLYPHS = ROOT / "launch" / "recipes" / "glyphs.yaml"


@pytest.fixture(scope="module")
def trained(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: copy it before changing it."""
    recipe = glyph_recipe(glyphs, tmp_path_factory.mktemp("trained") / "run")
    train(recipe, rank_world())
    return recipe.run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_help_lists_every_command(kway, capsys):
    assert kway("--help") == 0
    shown = capsys.readouterr().out
    names = {command.name for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names >= {"train", "eval", "export", "serve", "query", "losses", "demo", "shard"}
    for name in names:
        assert f"│ {name} " in shown, name
    assert "--traceback" in shown


def test_every_command_prints_its_help(kway, capsys):
    for command in app.registered_commands:
        assert kway(command.name, "--help") == 0
        assert "Usage:" in capsys.readouterr().out


def test_losses_lists_every_loss_and_whether_it_is_aligned(kway, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # off a terminal each loss is one line
    assert kway("losses") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:-1]}
    assert rows.keys() == LOSSES.keys()
    for kind in LOSSES:
        loss = LOSSES[kind]()
        assert loss.paper in rows[kind]
        assert loss.statistic in rows[kind]
        assert ("  yes  " in rows[kind]) == loss.aligned
        assert loss.aligned_if in rows[kind]
    assert "k=5, tau=1.0, alpha=1.0" in rows["smooth_topk"]
    assert "samples=null (the exact expectation)" in rows["nce"]
    assert "w=null (sqrt(K - 1) - 1)" in rows["ccql"]
    assert not [kind for kind, row in rows.items() if "null ()" in row]


def test_print_config_shows_the_resolved_recipe_and_starts_nothing(kway, glyphs, tmp_path, capsys):
    path = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    overrides = ["optimizer.lr=0.25", "head.loss.kind=bce", "train.duration.epochs=3"]
    assert kway("train", path, *overrides, "--print-config") == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert load_recipe(printed) == load_recipe(path, overrides)
    assert load_recipe(printed).optimizer.lr == 0.25
    assert not (tmp_path / "run").exists()


def test_eval_measures_the_newest_checkpoint_as_training_did(kway, run, capsys):
    folder = RunFolder(run).evaluations
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert kway("eval", run) == 0
    shown, error = capsys.readouterr()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert shown.startswith(f"{run} at step 4: 57 samples of test\n")
    assert {"top1", "top5", "sa", "auprc"} <= set(shown.split())
    assert error == ""  # no bar off a terminal


def test_export_writes_a_bundle_that_query_asks(kway, run, tmp_path, capsys):
    out = tmp_path / "bundle"
    assert kway("export", run, "-o", out) == 0
    assert capsys.readouterr().out == f"{out} is ready: kway serve {out}\n"
    with Bundle.open(out) as bundle:
        name = bundle.names.names[3]
    image = tmp_path / "image.png"
    assert cv2.imwrite(str(image), np.full((16, 16), 200, np.uint8))
    assert kway("query", out, image, "--class", name, "--recall", "0.9") == 0
    assert "threshold" in capsys.readouterr().out


def no_recipe(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "nothing.yaml"), "recipe nothing.yaml does not exist: give the path"


def unknown_key(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    code = kway("train", run / "recipe.yaml", "optimizer.lrr=1")
    return code, "optimizer.lrr is not a known key: did you mean lr?"


def eval_of_no_run(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", tmp_path), f"{tmp_path} is not a run (no recipe.yaml in it): give"


def export_of_no_run(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("export", tmp_path, "-o", tmp_path / "bundle"), f"{tmp_path} is not a run"


def no_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    shutil.rmtree(run / "checkpoints")
    return kway("eval", run), f"run {run} has no checkpoint to load: train it first"


def damaged_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    (path,) = run.glob("checkpoints/*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    return kway("eval", run), f"{path.name} is not what was written"


def moved_shards(run: Path, glyphs: Path, tmp_path: Path) -> Path:
    """A run whose recipe names a copy of its shards, to be damaged."""
    copy = shutil.copytree(glyphs, tmp_path / "copy")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(glyphs), str(copy)))
    return copy


def no_manifest(kway: Kway, run: Path, glyphs: Path, tmp_path: Path) -> tuple[int, str]:
    copy = moved_shards(run, glyphs, tmp_path)
    (copy / "manifest.json").unlink()
    return kway("eval", run), f"{copy / 'manifest.json'} is missing"


def damaged_manifest(kway: Kway, run: Path, glyphs: Path, tmp_path: Path) -> tuple[int, str]:
    path = moved_shards(run, glyphs, tmp_path) / "manifest.json"
    path.write_text(path.read_text()[:-10])
    return kway("eval", run), str(path)


def no_evaluation(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    shutil.rmtree(run / "evaluations")
    return kway("export", run, "-o", tmp_path / "bundle"), "does not exist: run `kway eval` on"


def export_at_no_recall(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    code = kway("export", run, "-o", tmp_path / "bundle", "--recall", "1.5")
    return code, "--recall 1.5: give one above 0 and at most 1"


def export_at_a_recall_not_evaluated(
    kway: Kway, run: Path, tmp_path: Path, **_: Any
) -> tuple[int, str]:
    code = kway("export", run, "-o", tmp_path / "bundle", "--recall", "0.5")
    return code, f"kway eval {run} --checkpoint 4 --set 'evaluation.recalls=[0.5, 0.9, 0.99]'`"


def export_onto_something(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    (tmp_path / "mine").mkdir()
    return kway("export", run, "-o", tmp_path / "mine"), "or replace it with --force"


def query_of_no_bundle(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    code = kway("query", tmp_path, run / "recipe.yaml", "--class", "x")
    return code, f"{tmp_path} is no bundle: it has no bundle.json; make one by kway export"


def query_of_no_image(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("query", tmp_path, "none.png", "--class", "x"), "none.png is no file: name images"


def shard_of_no_folder(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    code = kway("shard", "imagefolder", tmp_path / "none", "-o", tmp_path / "out")
    return code, str(tmp_path / "none")


def endless_body(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--max-body-mib", "inf"), "--max-body-mib"


def no_number(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--timeout", "nan"), "--timeout"


def endless_wait(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--batch-wait", "inf"), "--batch-wait"


def unknown_option(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "--fast"), "--fast"


def unknown_command(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("trian"), "No such command 'trian'"


def name_of_two_lines(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", tmp_path / "a\n  b"), f"{tmp_path}/a b is not a run"


def no_such_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--checkpoint", 7), f"{run} has no checkpoint of step 7: there are 4"


def table_nowhere(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    place = tmp_path / "none" / "a.csv"
    return kway("eval", run, "--classes", place), f"{place} cannot be written (No such file"


def table_in_the_place_of_a_folder(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--classes", "."), ". is a folder: name a file in it with --classes"


def report_nowhere(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    place = tmp_path / "none" / "a.html"
    return kway("report", run, "-o", place), f"{place} cannot be written (No such file"


def no_process(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--nproc", "0"), "'--nproc': Input should be greater than or equal"


def one_class(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("plan", GLYPHS, "--classes=1"), "equal to 2, got 1"


def endless_link(kway: Kway, **_: Any) -> tuple[int, str]:
    arguments = ("plan", GLYPHS, "--link-gbps", "inf")
    return kway(*arguments), "--link-gbps is inf: give a number"


def folder_for_a_recipe(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "."), "recipe . is a folder: give the path of a YAML file"


MISTAKES = [
    no_such_checkpoint,
    table_nowhere,
    table_in_the_place_of_a_folder,
    report_nowhere,
    no_process,
    one_class,
    endless_link,
    folder_for_a_recipe,
    no_recipe,
    unknown_key,
    eval_of_no_run,
    export_of_no_run,
    no_checkpoint,
    damaged_checkpoint,
    no_manifest,
    damaged_manifest,
    no_evaluation,
    export_at_no_recall,
    export_at_a_recall_not_evaluated,
    export_onto_something,
    query_of_no_bundle,
    query_of_no_image,
    shard_of_no_folder,
    endless_body,
    no_number,
    endless_wait,
    unknown_option,
    unknown_command,
    name_of_two_lines,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_thing_and_exit_code_2(
    mistake, kway, run, glyphs, tmp_path, capsys
):
    before = {path.name for path in tmp_path.iterdir()}
    code, message = mistake(kway=kway, run=run, glyphs=glyphs, tmp_path=tmp_path)
    out, error = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1, error
    # Nothing is left behind but what the mistake needed.
    assert {path.name for path in tmp_path.iterdir()} - before <= {"copy", "mine"}


def test_without_a_command_there_is_help_and_exit_code_2(kway, capsys):
    assert kway() == 2
    out, error = capsys.readouterr()
    assert "Usage:" in out
    assert "error:" not in error


def test_traceback_shows_where_an_error_came_from(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["kway", "--traceback", "eval", str(tmp_path)])
    with pytest.raises(FileNotFoundError) as caught:
        main()
    assert caught.traceback[-1].path == ROOT / "trainer/run/folder.py"


def test_the_installed_command_ends_with_the_code_and_one_line():
    command = [Path(sys.executable).with_name("kway"), "train", "nothing.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: recipe nothing.yaml does not exist: give the path of a YAML file\n"
    )


def processes_with(mark: str) -> list[psutil.Process]:
    """Living processes that inherited the environment variable KWAY_TEST_MARK=mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KWAY_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue
    return found


def test_the_signal_handlers_are_ours_again_after_a_run():
    code = (
        "import signal; from launch.ranks.placement import Placement\n"
        "from launch.ranks.run import run_ranks\n"
        "numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)\n"
        "before = [signal.getsignal(number) for number in numbers]\n"
        "assert run_ranks('platform', [], Placement(1)) == 0\n"
        "assert [signal.getsignal(number) for number in numbers] == before\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_demo_ends_its_server_too(number, tmp_path):
    mark, bundle = uuid.uuid4().hex, write_bundle(tmp_path / "bundle")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from launch.commands.demo import exit_on_signals; from launch.demo import questions\n"
        "exit_on_signals()\n"
        "with questions.server(Path(sys.argv[1]), Path(sys.argv[2])) as url:\n"
        "    print(url, flush=True); time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(bundle), str(tmp_path / "log")],
        cwd=ROOT,
        env=environment() | {"KWAY_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://")
        assert len(processes_with(mark)) > 2
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    # Python ends itself by SIGINT where nobody catches it; `kway` makes 130 of it.
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert ("Traceback" in error) is (number == signal.SIGINT)
    assert processes_with(mark) == []


def test_the_demo_compares_the_last_checkpoints_and_not_an_older_runs_leftovers(run, tmp_path):
    shutil.move(run, runs.DENSE_CE.folder(tmp_path))
    folder = RunFolder(runs.DENSE_CE.folder(tmp_path)).evaluations
    expected = json.loads((folder / "step-00000004.json").read_text())
    (folder / "step-00000099.json").write_text("{}")
    assert runs.DENSE_CE.measures(tmp_path) == expected


def test_the_recipe_that_the_demo_names_is_there_wherever_one_stands(tmp_path, monkeypatch):
    for folder in (ROOT, tmp_path):
        monkeypatch.chdir(folder)
        named, *_ = runs.DENSE_CE.arguments(tmp_path, tmp_path / "shards", 1.0)
        assert Path(named).samefile(runs.RECIPE)
        assert Path(named).is_absolute() is (folder == tmp_path)


@pytest.mark.slow
def test_the_demo_goes_the_whole_way_twice_and_leaves_no_process(tmp_path):
    """The second time it finds its runs finished: no step is trained again."""
    out, mark = tmp_path / "demo", uuid.uuid4().hex
    command = [*KWAY, "demo", "--classes", "40", "--epochs", "0.5", "-o", str(out)]
    for time in ("first", "second"):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
            env=environment() | {"KWAY_TEST_MARK": mark},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert processes_with(mark) == []
        assert ("is complete already" in done.stdout) is (time == "second")
        assert "Three questions about held-out images" in done.stdout
        runs = sorted(path.name for path in (out / "runs").iterdir())
        assert runs == ["dense-batch_ce", "dense-ce", "vtree-ce"]
        # Lines of steps: a finished run prints none.
        assert ("  loss " in done.stdout) is (time == "first")
        assert (out / "comparison.png").stat().st_size > 10_000
        assert (out / "comparison.md").read_text().count("\n") == 5
        with Bundle.open(out / "bundle") as bundle:
            bundle.verify()


def test_the_mark_of_the_demo_test_finds_grandchildren():
    mark = uuid.uuid4().hex
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env=os.environ | {"KWAY_TEST_MARK": mark},
    )
    try:
        while len(processes_with(mark)) < 2:
            assert child.poll() is None
    finally:
        child.communicate(b"\n")
    assert processes_with(mark) == []
