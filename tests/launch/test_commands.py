"""The `kway` command: its output, exit codes and one-line errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil
import pytest

from heads.losses import LOSSES
from launch.demo import runs
from launch.main import app, main
from tests.dispositions import default_signals
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, environment, write_recipe
from tests.tiny_bundle import write as write_bundle
from tests.waiting import wait_until
from trainer.bundle.bundle import Bundle
from trainer.recipe import load_recipe
from trainer.run.folder import RunFolder
from trainer.train import train

Kway = Callable[..., int]
GLYPHS = ROOT / "launch" / "recipes" / "glyphs.yaml"


@pytest.fixture(scope="module")
def trained(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Copy it before changing it."""
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


def test_version_is_that_of_the_installed_kway(kway, capsys):
    assert kway("--version") == 0
    assert capsys.readouterr().out == f"kway {version('kway')}\n"


def test_every_command_has_help(kway, capsys):
    for command in app.registered_commands:
        assert kway(command.name, "--help") == 0
        assert "Usage:" in capsys.readouterr().out


def test_kway_losses_lists_every_loss_and_its_alignment(kway, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # without a terminal each loss is one line
    assert kway("losses") == 0
    table, legend = capsys.readouterr().out.split("\n\n")
    rows = {line.split()[0]: line for line in table.splitlines()[1:]}
    assert rows.keys() == LOSSES.keys()
    for kind in LOSSES:
        loss = LOSSES[kind]()
        assert loss.paper in rows[kind]
        assert loss.statistic in rows[kind]
        aligned = "depends" if loss.aligned_if else "yes" if loss.aligned else "no"
        assert rows[kind].split()[1] == aligned
        assert not loss.aligned_if or f"{kind} is aligned if {loss.aligned_if}." in legend
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


def test_kway_eval_reproduces_the_evaluation_of_training(kway, run, capsys):
    folder = RunFolder(run).evaluations
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    assert kway("eval", run) == 0
    shown, error = capsys.readouterr()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert shown.startswith(f"{run} at step 4: 57 samples of test\n")
    assert {"top1", "top5", "sa", "auprc"} <= set(shown.split())
    assert error == ""  # no progress bar without a terminal


def test_kway_export_writes_a_bundle_that_kway_query_reads(kway, run, tmp_path, capsys):
    out = tmp_path / "bundle"
    assert kway("export", run, "-o", out) == 0
    assert capsys.readouterr().out.splitlines() == [
        "thresholds for recall 0.9: 13 pooled",
        "thresholds for recall 0.99: 13 pooled",
        f"{out} is ready: kway serve {out}",
    ]
    with Bundle.open(out) as bundle:
        name = bundle.names.names[3]
    image = tmp_path / "image.png"
    assert cv2.imwrite(str(image), np.full((16, 16), 200, np.uint8))
    assert kway("query", out, image, "--class", name, "--recall", "0.9") == 0
    assert "threshold" in capsys.readouterr().out


def no_recipe(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "nothing.yaml"), "recipe nothing.yaml does not exist"


def unknown_key(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    code = kway("train", run / "recipe.yaml", "optimizer.lrr=1")
    return code, "optimizer.lrr is not a known key: did you mean lr?"


def eval_without_a_run(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", tmp_path), f"{tmp_path} is not a run"


def export_without_a_run(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("export", tmp_path, "-o", tmp_path / "bundle"), f"{tmp_path} is not a run"


def no_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    shutil.rmtree(run / "checkpoints")
    return kway("eval", run), f"{run} has no checkpoint"


def damaged_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    (path,) = run.glob("checkpoints/*/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    return kway("eval", run), path.name


def moved_shards(run: Path, glyphs: Path, tmp_path: Path) -> Path:
    """Copy a run's shards to a folder where they can be damaged, and update the run's recipe."""
    copy = shutil.copytree(glyphs, tmp_path / "copy")
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(glyphs), str(copy)))
    return copy


def no_manifest(kway: Kway, run: Path, glyphs: Path, tmp_path: Path) -> tuple[int, str]:
    copy = moved_shards(run, glyphs, tmp_path)
    (copy / "manifest.json").unlink()
    return kway("eval", run), "manifest.json"


def damaged_manifest(kway: Kway, run: Path, glyphs: Path, tmp_path: Path) -> tuple[int, str]:
    path = moved_shards(run, glyphs, tmp_path) / "manifest.json"
    path.write_text(path.read_text()[:-10])
    return kway("eval", run), str(path)


def no_evaluation(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    shutil.rmtree(run / "evaluations")
    return kway("export", run, "-o", tmp_path / "bundle"), "run `kway eval`"


def export_with_an_invalid_recall(
    kway: Kway, run: Path, tmp_path: Path, **_: Any
) -> tuple[int, str]:
    code = kway("export", run, "-o", tmp_path / "bundle", "--recall", "1.5")
    return code, "--recall 1.5: pass a number above 0"


def export_with_an_invalid_confidence(
    kway: Kway, run: Path, tmp_path: Path, **_: Any
) -> tuple[int, str]:
    code = kway("export", run, "-o", tmp_path / "bundle", "--confidence", "1")
    return code, "--confidence 1: pass a number above 0 and below 1"


def export_with_a_recall_that_was_not_evaluated(
    kway: Kway, run: Path, tmp_path: Path, **_: Any
) -> tuple[int, str]:
    code = kway("export", run, "-o", tmp_path / "bundle", "--recall", "0.5")
    return code, f"kway eval {run} --checkpoint 4 --set 'evaluation.recalls=[0.5, 0.9, 0.99]'`"


def export_to_an_existing_folder(
    kway: Kway, run: Path, tmp_path: Path, **_: Any
) -> tuple[int, str]:
    (tmp_path / "mine").mkdir()
    return kway("export", run, "-o", tmp_path / "mine"), "or pass --force"


def query_without_a_bundle(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    code = kway("query", tmp_path, run / "recipe.yaml", "--class", "x")
    return code, "bundle.json"


def query_without_an_image(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("query", tmp_path, "none.png", "--class", "x"), "none.png is not a file"


def shard_without_a_folder(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    code = kway("shard", "imagefolder", tmp_path / "none", "-o", tmp_path / "out")
    return code, str(tmp_path / "none")


def infinite_body(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--max-body-mib", "inf"), "--max-body-mib"


def timeout_nan(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--timeout", "nan"), "--timeout"


def infinite_wait(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("serve", tmp_path, "--batch-wait", "inf"), "--batch-wait"


def unknown_option(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "--fast"), "--fast"


def unknown_command(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("trian"), "No such command 'trian'"


def name_with_a_newline(kway: Kway, tmp_path: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", tmp_path / "a\n  b"), f"{tmp_path}/a b is not a run"


def missing_checkpoint(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--checkpoint", 7), "step 7"


def table_in_a_missing_folder(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    path = tmp_path / "none" / "a.csv"
    return kway("eval", run, "--classes", path), f"{path} cannot be written (No such file"


def table_onto_a_folder(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--classes", "."), ". is a folder: pass"


def report_in_a_missing_folder(kway: Kway, run: Path, tmp_path: Path, **_: Any) -> tuple[int, str]:
    path = tmp_path / "none" / "a.html"
    return kway("report", run, "-o", path), f"{path} cannot be written (No such file"


def zero_processes(kway: Kway, run: Path, **_: Any) -> tuple[int, str]:
    return kway("eval", run, "--nproc", "0"), "'--nproc': Input should be greater than or equal"


def one_class(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("plan", GLYPHS, "--classes=1"), "equal to 2, got 1"


def infinite_link(kway: Kway, **_: Any) -> tuple[int, str]:
    arguments = ("plan", GLYPHS, "--link-gbps", "inf")
    return kway(*arguments), "--link-gbps is inf: pass a number"


def folder_instead_of_a_recipe(kway: Kway, **_: Any) -> tuple[int, str]:
    return kway("train", "."), "recipe . is a folder"


INVALID = [
    missing_checkpoint,
    table_in_a_missing_folder,
    table_onto_a_folder,
    report_in_a_missing_folder,
    zero_processes,
    one_class,
    infinite_link,
    folder_instead_of_a_recipe,
    no_recipe,
    unknown_key,
    eval_without_a_run,
    export_without_a_run,
    no_checkpoint,
    damaged_checkpoint,
    no_manifest,
    damaged_manifest,
    no_evaluation,
    export_with_an_invalid_recall,
    export_with_an_invalid_confidence,
    export_with_a_recall_that_was_not_evaluated,
    export_to_an_existing_folder,
    query_without_a_bundle,
    query_without_an_image,
    shard_without_a_folder,
    infinite_body,
    timeout_nan,
    infinite_wait,
    unknown_option,
    unknown_command,
    name_with_a_newline,
]


@pytest.mark.parametrize("run_invalid", INVALID)
def test_invalid_input_exits_with_2_and_a_one_line_error(
    run_invalid, kway, run, glyphs, tmp_path, capsys
):
    before = {path.name for path in tmp_path.iterdir()}
    code, message = run_invalid(kway=kway, run=run, glyphs=glyphs, tmp_path=tmp_path)
    out, error = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1, error
    # The command leaves no files behind. These folders belong to the invalid input.
    assert {path.name for path in tmp_path.iterdir()} - before <= {"copy", "mine"}


def test_kway_without_a_command_prints_help_and_exits_with_2(kway, capsys):
    assert kway() == 2
    out, error = capsys.readouterr()
    assert "Usage:" in out
    assert "error:" not in error


def test_traceback_shows_where_an_error_came_from(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["kway", "--traceback", "eval", str(tmp_path)])
    with pytest.raises(FileNotFoundError) as caught:
        main()
    assert caught.traceback[-1].path == ROOT / "trainer/run/folder.py"


def test_the_installed_command_exits_with_2_and_a_one_line_error():
    command = [Path(sys.executable).with_name("kway"), "train", "nothing.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: recipe nothing.yaml does not exist")
    assert done.stderr.count("\n") == 1


def processes_with(mark: str) -> list[psutil.Process]:
    """Return running processes that inherited the environment variable KWAY_TEST_MARK=mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KWAY_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:  # it has exited, or belongs to another user
            continue
    return found


def test_run_ranks_restores_the_signal_handlers():
    code = (
        "import signal; from launch.ranks.placement import Placement\n"
        "from launch.ranks.run import run_ranks\n"
        "numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)\n"
        "before = [signal.getsignal(number) for number in numbers]\n"
        "assert run_ranks('platform', [], Placement(1)) == 0\n"
        "assert [signal.getsignal(number) for number in numbers] == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@default_signals()
def test_a_signal_to_the_demo_stops_its_server(number, tmp_path):
    mark, bundle = uuid.uuid4().hex, write_bundle(tmp_path / "bundle")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from launch.commands.demo import exit_on_signals; from launch.demo import queries\n"
        "exit_on_signals()\n"
        "with queries.server(Path(sys.argv[1]), Path(sys.argv[2])) as url:\n"
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
    # Without a handler, Python ends itself with SIGINT. `kway` exits with 130 instead.
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert ("Traceback" in error) is (number == signal.SIGINT)
    assert processes_with(mark) == []


def test_the_demo_ignores_evaluations_of_an_older_run(run, tmp_path):
    shutil.move(run, runs.DENSE_CE.folder(tmp_path))
    folder = RunFolder(runs.DENSE_CE.folder(tmp_path)).evaluations
    expected = json.loads((folder / "step-00000004.json").read_text())
    (folder / "step-00000099.json").write_text("{}")
    assert runs.DENSE_CE.measures(tmp_path) == expected


@pytest.mark.slow
def test_the_demo_completes_twice_and_leaves_no_process(tmp_path):
    """The second time, the runs are already finished, so no step runs again."""
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
        assert ("is already complete" in done.stdout) is (time == "second")
        assert "Single-class queries for three held-out images" in done.stdout
        runs = sorted(path.name for path in (out / "runs").iterdir())
        assert runs == ["dense-batch_ce", "dense-ce", "vtree-ce"]
        # A finished run prints no step lines.
        assert ("  loss " in done.stdout) is (time == "first")
        assert (out / "comparison.png").stat().st_size > 10_000
        assert (out / "comparison.md").read_text().count("\n") == 5
        with Bundle.open(out / "bundle") as bundle:
            bundle.verify()


def test_processes_with_finds_grandchildren():
    mark = uuid.uuid4().hex
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        env=os.environ | {"KWAY_TEST_MARK": mark},
    )
    try:
        wait_until(lambda: len(processes_with(mark)) == 2, possible=lambda: child.poll() is None)
    finally:
        child.communicate(b"\n")
    assert processes_with(mark) == []
